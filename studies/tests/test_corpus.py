"""The corpus that ships with the project, and the refusal of a damaged one."""

import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from spectral_fairseq.errors import DataError
from studies import corpus

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDER = EXAMPLES / "data" / "opendocs_de_en"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    destination = tmp_path_factory.mktemp("text")
    result = corpus.unpack(FOLDER, destination)
    return destination, result


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(FOLDER, tmp_path / "corpus"))


def test_counts_are_those_of_the_readme_and_the_description(unpacked):
    folder, result = unpacked
    readme = (FOLDER / "README.md").read_text("utf-8")
    assert result["sha256"] in readme
    for split, counts in corpus.load_manifest(FOLDER)["splits"].items():
        sides = ("de", "en", "doc")
        lines = {side: corpus.read_lines(folder / f"{split}.{side}") for side in sides}
        assert {len(side) for side in lines.values()} == {counts["pairs"]}
        found = {
            "pairs": len(lines["doc"]),
            "documents": len(set(lines["doc"])),
            "words_de": sum(len(line.split()) for line in lines["de"]),
            "words_en": sum(len(line.split()) for line in lines["en"]),
        }
        assert found == counts
        assert f"| {split} | " + " | ".join(f"{n:,}" for n in found.values()) + " |" in readme
        assert all(line.strip() == line and line for side in lines.values() for line in side)


def test_no_document_is_in_two_splits(unpacked):
    folder, _ = unpacked
    train, valid, test = (
        set(corpus.read_lines(folder / f"{split}.doc")) for split in ("train", "valid", "test")
    )
    assert not (train & valid or train & test or valid & test)


def test_licence_and_notice_are_there():
    assert (FOLDER / "LICENSE").read_text("utf-8").startswith("Mozilla Public License Version 2.0")
    assert "LibreOffice" in (FOLDER / "NOTICE").read_text("utf-8")


def test_archive_holds_only_what_is_described():
    manifest = corpus.load_manifest(FOLDER)
    with tarfile.open(FOLDER / manifest["archive"]) as tar:
        assert sorted(tar.getnames()) == sorted(manifest["files"])


def repack(folder, change):
    """Put another archive, with its own right checksum, into a corpus folder."""
    manifest = corpus.load_manifest(folder)
    path = folder / manifest["archive"]
    with tarfile.open(path) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}
    change(files)
    with tarfile.open(path, "w:xz", preset=0) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    manifest["sha256"] = corpus.sha256(path.read_bytes())
    (folder / "corpus.json").write_text(json.dumps(manifest), "utf-8")


def test_damaged_archive_is_refused(copy, tmp_path):
    path = copy / corpus.load_manifest(copy)["archive"]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="SHA-256"):
        corpus.unpack(copy, tmp_path / "text")
    assert not (tmp_path / "text").exists()


def test_missing_archive_is_refused(copy, tmp_path):
    (copy / corpus.load_manifest(copy)["archive"]).unlink()
    with pytest.raises(DataError, match="Restore"):
        corpus.unpack(copy, tmp_path / "text")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"archive": "x"}'], ids=["empty", "cut", "list", "incomplete"]
)
def test_damaged_description_is_refused(copy, content):
    (copy / "corpus.json").write_text(content, "utf-8")
    with pytest.raises(DataError, match=r"corpus\.json"):
        corpus.load_manifest(copy)


@pytest.mark.slow
def test_changed_file_is_refused(copy, tmp_path):
    repack(copy, lambda files: files.update({"test.en": files["test.en"] + b"one more\n"}))
    with pytest.raises(DataError, match=r"test\.en"):
        corpus.unpack(copy, tmp_path / "text")


@pytest.mark.slow
def test_missing_file_is_refused(copy, tmp_path):
    repack(copy, lambda files: files.pop("valid.de"))
    with pytest.raises(DataError, match=r"valid\.de"):
        corpus.unpack(copy, tmp_path / "text")


def test_archive_that_is_none_is_refused(copy, tmp_path):
    manifest = corpus.load_manifest(copy)
    path = copy / manifest["archive"]
    path.write_bytes(path.read_bytes()[:5000])
    manifest["sha256"] = corpus.sha256(path.read_bytes())
    (copy / "corpus.json").write_text(json.dumps(manifest), "utf-8")
    with pytest.raises(DataError, match="readable archive"):
        corpus.unpack(copy, tmp_path / "text")


@pytest.mark.slow
def test_nothing_undescribed_is_written(copy, tmp_path):
    repack(copy, lambda files: files.update({"../outside": b"x", "extra": b"x"}))
    corpus.unpack(copy, tmp_path / "text")
    assert not (tmp_path / "outside").exists()
    assert not (tmp_path / "text" / "extra").exists()


def test_subwords_are_deterministic_and_reversible(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for language in ("de", "en"):
        lines = corpus_lines(language)
        (text / f"train.{language}").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    (text / "train.doc").write_text("QQQQ\n" * 500, "utf-8")  # names, not text
    for name in ("first", "second"):
        corpus.learn_subwords(text, tmp_path / f"{name}.model", 200)
    vocabulary = (tmp_path / "first.vocab").read_text("utf-8")
    assert vocabulary == (tmp_path / "second.vocab").read_text("utf-8")
    assert len(vocabulary.splitlines()) == 200
    assert "Q" not in vocabulary
    corpus.encode(text, tmp_path / "first.model", tmp_path / "subwords")
    assert sorted(path.name for path in (tmp_path / "subwords").iterdir()) == [
        "train.de",
        "train.en",
    ]
    encoded = corpus.read_lines(tmp_path / "subwords" / "train.de")
    decoded = [line.replace(" ", "").replace("\u2581", " ").strip() for line in encoded]
    assert decoded == corpus_lines("de")


def corpus_lines(language):
    words = {"de": ["Öffnen", "Sie", "die", "Datei", "und"], "en": ["Open", "the", "file", "and"]}
    return [
        " ".join(words[language][(i * j) % len(words[language])] + str(i) for j in range(1, 5))
        for i in range(120)
    ]


def test_too_small_a_text_is_refused(tmp_path):
    (tmp_path / "train.de").write_text("ein Wort\n", "utf-8")
    (tmp_path / "train.en").write_text("a word\n", "utf-8")
    for vocabulary in (5000, 1):  # too many, too few
        with pytest.raises(DataError, match="another --vocabulary, and with it another --work-dir"):
            corpus.learn_subwords(tmp_path, tmp_path / "m.model", vocabulary)


def test_a_folder_may_have_commas_in_its_name(tmp_path):
    folder = tmp_path / 'a, "b"'
    folder.mkdir()
    for language in ("de", "en"):
        (folder / f"train.{language}").write_text("ein Wort\na word\n", "utf-8")
    corpus.learn_subwords(folder, folder / "m.model", 20)
    assert (folder / "m.model").exists()
