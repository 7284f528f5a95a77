"""The comparison of methods: once as a whole on a few hundred pairs of plain text."""

import json
import re
from pathlib import Path

import pytest

from spectral_fairseq.errors import DataError
from studies import corpus
from studies import sotu as lm_sotu
from studies.opendocs import METHODS, main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


PAIRS = {"train": 400, "valid": 12, "test": 7}


@pytest.fixture(scope="module")
def plain_text(tmp_path_factory):
    """The first pairs of the corpus that ships, as files."""
    folder, whole = tmp_path_factory.mktemp("corpus"), tmp_path_factory.mktemp("whole")
    corpus.unpack(EXAMPLES / "data" / "opendocs_de_en", whole)
    for split, count in PAIRS.items():
        for language in ("de", "en"):
            lines = corpus.read_lines(whole / f"{split}.{language}")[:count]
            text = "".join(f"{line}\n" for line in lines)
            (folder / f"{split}.{language}").write_text(text, "utf-8")
    (folder / "train.src").write_text("not part of the corpus\n")
    return folder


def test_plain_text_is_a_corpus(plain_text, tmp_path):
    found = corpus.unpack(plain_text, tmp_path / "text")
    assert found["pairs"] == PAIRS
    assert not (tmp_path / "text" / "train.src").exists()
    before = found["sha256"]
    line = (plain_text / "test.en").read_text("utf-8")
    changed = tmp_path / "changed"
    corpus.unpack(plain_text, changed)
    (changed / "test.en").write_text(line.replace("a", "b", 1), "utf-8")
    assert corpus.load_manifest(changed)["sha256"] != before
    (changed / "test.en").write_text(line + "one more\n", "utf-8")
    with pytest.raises(DataError, match="equally many lines"):
        corpus.load_manifest(changed)
    (changed / "valid.de").unlink()
    with pytest.raises(DataError, match=r"valid\.de"):
        corpus.load_manifest(changed)


def test_lines_of_plain_text_end_at_line_feeds(tmp_path):
    for split in PAIRS:
        (tmp_path / f"{split}.de").write_bytes(b"a\rb\nc\n\nd")  # the last one without
        (tmp_path / f"{split}.en").write_bytes("x\u2028\ny\nz\nw\n".encode())
    assert corpus.unpack(tmp_path, tmp_path / "text")["pairs"] == dict.fromkeys(PAIRS, 4)
    assert corpus.read_lines(tmp_path / "text" / "train.de") == ["a\rb", "c", "", "d"]
    assert corpus.read_lines(tmp_path / "text" / "train.en") == ["x\u2028", "y", "z", "w"]
    (tmp_path / "test.de").write_bytes("ä\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"UTF-8 in .*test\.de"):
        corpus.load_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "a/b"])
def test_files_outside_the_folder_are_refused(name, tmp_path):
    description = {"sha256": "", "splits": {}, "source_language": "de", "target_language": "en"}
    for changed in ({"archive": None, "files": {name: {}}}, {"archive": name, "files": {}}):
        (tmp_path / "corpus.json").write_text(json.dumps({**description, **changed}))
        with pytest.raises(DataError, match="no name of a file"):
            corpus.load_manifest(tmp_path)


def test_flags_of_every_method_are_known():
    from fairseq import options
    from fairseq.criterions import CRITERION_REGISTRY

    import spectral_fairseq.plugin  # noqa: F401  registers the architectures

    of_language_models = [["--task", "language_modeling", *one] for one in lm_sotu.METHODS.values()]
    for flags in [*(method.flags for method in METHODS.values()), *of_language_models]:
        arguments = ["data", *flags, "--optimizer", "adam"]
        parsed = options.parse_args_and_arch(options.get_training_parser(), arguments)
        assert parsed.criterion in CRITERION_REGISTRY


def test_the_page_has_the_flags_of_every_method():
    page = (EXAMPLES / "translation_opendocs_de_en" / "README.md").read_text("utf-8")
    of_the_page, row = {}, {}
    for name, added in re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE):
        plain = of_the_page.get("plain", {})
        row = dict(row if re.match("the (same|row above) with", added) else plain)
        if name == "adversarial":
            plain["--criterion"] = row["--criterion"] = "regularized_cross_entropy"
        row.update(re.findall(r"(--[\w-]+) ([^ `]+)", added))
        of_the_page[name] = row
    flags = {name: dict(zip(*[iter(method.flags)] * 2)) for name, method in METHODS.items()}
    of_the_page["plain"] = {**of_the_page["plain"], "--criterion": "label_smoothed_cross_entropy"}
    assert of_the_page == flags and list(of_the_page) == list(flags)


@pytest.mark.slow
@pytest.mark.usefixtures("own_process", "forked_commands")
def test_methods_are_added_to_a_finished_comparison(plain_text, tmp_path, capsys):
    work = tmp_path / "work"

    def run(*methods_and_more):
        options = ("--work-dir", work, "--updates", "12", "--vocabulary", "400", "--dim", "16")
        options += ("--layers", "1", "--cpu", "--seeds", "1", "--methods", *methods_and_more)
        status = main([str(option) for option in options], default_corpus=plain_text)
        return status, *capsys.readouterr()

    status, _, err = run("plain")
    assert status == 0, err
    before = {path: path.stat().st_mtime_ns for path in work.rglob("checkpoint_best.pt")}
    assert len(before) == 1

    status, out, err = run("plain", "mos")
    assert status == 0, err
    assert "2 runs, 1 done before" in out and "fairseq-generate, 1 runs" in out
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    table = (work / "table.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines()]
    assert ["plain", "1"] in rows and ["mos", "1"] in rows and table in out
    figures = json.loads((work / "mos" / "seed-1" / "figures.json").read_text("utf-8"))
    assert figures["updates"] == 12 and "transformer_mos" in figures["train_command"]
    assert [path.name for path in (work / "mos" / "seed-1" / "checkpoints").iterdir()] == [
        "checkpoint_best.pt"
    ]

    status, _, err = run("plain", "--dim", 32)
    assert status == 1 and "dim 16 -> 32" in err
