"""The quickstart: its parts, and once the whole of it on a few hundred sentences."""

import dataclasses
import importlib.util
import io
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
import types
from pathlib import Path

import pytest

import spectral_fairseq
from spectral_fairseq.errors import ConfigurationError
from studies import (
    corpus,
    machine,
    quickstart,
    quickstart_figures,
    training,
)
from studies.work_folder import WorkDir
from tests.conftest import PACKAGE

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


CORPUS = EXAMPLES / "data" / "opendocs_de_en"

PATH = os.pathsep.join(
    (str(PACKAGE.parent), str(EXAMPLES.parent), os.environ.get("PYTHONPATH", ""))
)
PAIRS = {"train": 400, "valid": 12, "test": 7}
OPTIONS = ("--updates", "60", "--vocabulary", "400", "--dim", "16", "--cpu")


def test_scores_carry_signatures():
    same = training.scores(["The cat sat on the mat."], ["The cat sat on the mat."])
    assert (same["bleu"], same["chrf"]) == (100, 100)
    assert "tok:13a" in same["bleu_signature"] and "version:" in same["bleu_signature"]
    assert same["chrf_signature"].startswith("chrF2|") and "nc:6" in same["chrf_signature"]


@pytest.mark.slow
def test_picture_is_the_same_for_the_same_figures(tmp_path):
    figures = {
        "plain": {"singular_values": [4.0, 1.0, 0.5]},
        "spectrum_control": {"singular_values": [2.0, 1.9, 1.8], "prior": [2.0, 1.95, 1.9]},
    }
    pictures = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        quickstart_figures.draw_spectra(figures, {key: key for key in figures}, tmp_path / name)
        pictures.append((tmp_path / name / "spectra.svg").read_bytes())
        assert (tmp_path / name / "spectra.png").read_bytes().startswith(b"\x89PNG")
    assert pictures[0] == pictures[1]


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory):
    """The first pairs of the corpus that ships, as a corpus of its own."""
    source, folder = CORPUS, tmp_path_factory.mktemp("corpus")
    manifest = corpus.load_manifest(source)
    manifest["splits"] = {split: {"pairs": count} for split, count in PAIRS.items()}
    archive = folder / manifest["archive"]
    with tarfile.open(source / manifest["archive"]) as whole, tarfile.open(archive, "w:xz") as part:
        for name in manifest["files"]:
            lines = whole.extractfile(name).read().split(b"\n")[: PAIRS[Path(name).stem]]
            data = b"".join(line + b"\n" for line in lines)
            member = tarfile.TarInfo(name)
            member.size = len(data)
            part.addfile(member, io.BytesIO(data))
            manifest["files"][name] = {"sha256": corpus.sha256(data)}
    manifest["sha256"] = corpus.sha256(archive.read_bytes())
    (folder / "corpus.json").write_text(json.dumps(manifest), "utf-8")
    return folder


def start(cwd, *options):
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / "quickstart" / "quickstart.py"), *map(str, options)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PATH, "PYTHONDONTWRITEBYTECODE": "1"},
        # A shell's background job ignores Ctrl-C, and its children would with it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process):
    out, err = process.communicate()
    return process.returncode, out, err


def wait_for(paths, process):
    while not all(path.exists() for path in paths):
        if process.poll() is not None:
            pytest.fail(f"ended too early: {finish(process)}")
        time.sleep(0.05)


@pytest.mark.slow
def test_interrupted_resumed_and_finished(small_corpus, tmp_path):
    options = ("--corpus", small_corpus, *OPTIONS)
    work = tmp_path / "quickstart"
    folders = [work / "plain", work / "spectrum_control"]

    process = start(tmp_path, *options)
    wait_for([folder / "checkpoints" / "checkpoint_last.pt" for folder in folders], process)
    process.send_signal(signal.SIGINT)
    status, _, err = finish(process)
    assert (status, "interrupted" in err) == (130, True), err
    assert not (work / "stamps" / "train.json").exists()
    with WorkDir(work).locked():  # no training survives, or it would hold the lock
        pass

    status, out, err = finish(start(tmp_path, *options))
    assert status == 0, err
    assert "[2/6] fairseq-preprocess (done before)" in out
    for name in ("sacreBLEU", "I1, both signs", "sigma_d / sigma_1", "BLEU|", "chrF2|"):
        assert name in out
    assert "Traceback" not in err and "DEBUG" not in err
    # Three sentences are translated on the way, and the table stands beside a random one.
    assert out.count("after 60  ") == 3 and "random table" in out
    assert out.count("after 18  ") == 6  # alone, and above the translations of the end
    assert out.index("after 18  ") < out.index("random table") < out.index("after 60  ")
    for folder in folders:
        assert "Loaded checkpoint" in (folder / "train.log").read_text("utf-8")

    results = json.loads((work / "results.json").read_text("utf-8"))
    assert results["settings"]["seed"] == 1
    assert results["versions"]["spectral_fairseq"] == spectral_fairseq.__version__
    assert "--user-dir" in results["commands"]["train_plain"]
    assert set(results["recipes"]) == {"plain", "spectrum_control"}
    for recipe, figures in results["recipes"].items():
        assert figures["updates"] == 60
        assert figures["dimensions"] == 16 and len(figures["singular_values"]) == 16
        assert 0 < figures["isotropy_as_is"]["I1_both_signs"] < 1
        assert 0 < figures["sigma_last_to_first"] <= 1
        assert math.isfinite(figures["valid_ppl"]) and figures["peak_bytes"] > 2**27
        assert len(corpus.read_lines(work / recipe / "test.en")) == PAIRS["test"]
    # No symbol but words is counted: the dictionary's 4 own symbols less padding, then subwords.
    symbols = len((work / "binary" / "dict.en.txt").read_text("utf-8").splitlines())
    fillers = (work / "binary" / "dict.en.txt").read_text("utf-8").count("madeupword")
    assert results["recipes"]["plain"]["words"] == symbols - fillers + 3
    for name in ("spectra.png", "spectra.svg", "results.txt", str(quickstart.REPORT)):
        assert (work / name).stat().st_size > 0
    assert (
        str(Path("quickstart", quickstart.REPORT)) in out and "Tune the weight decay first" in out
    )
    assert [path.name for path in tmp_path.iterdir()] == ["quickstart"]

    before = {path: path.stat().st_mtime_ns for path in work.rglob("*.pt")}
    status, again, _ = finish(start(tmp_path, *options))
    assert status == 0
    assert (work / "results.txt").read_text("utf-8") in again
    assert {path: path.stat().st_mtime_ns for path in work.rglob("*.pt")} == before


def test_a_training_that_goes_on_is_not_looked_at_again(small_corpus, tmp_path, monkeypatch):
    """Its best checkpoint is then one of more updates than the first look's."""
    options = ["--corpus", str(small_corpus), "--work-dir", str(tmp_path / "work"), *OPTIONS]
    arguments = quickstart.parse_arguments(options, CORPUS)
    (tmp_path / "work").mkdir()
    job = quickstart.Quickstart(
        arguments, quickstart.settings_of(arguments), WorkDir(tmp_path / "work")
    )
    trained, looked = [], []

    def train_all(runs, workers):
        trained.append(len(runs))
        if len(trained) == 2:
            raise KeyboardInterrupt

    class Looked:
        def job(self, updates):
            looked.append(updates)

        def translations(self, updates):
            return []

        def text(self, after):
            return ""

    monkeypatch.setattr(quickstart, "train_all", train_all)
    monkeypatch.setattr(quickstart, "analyze", lambda path: "")
    monkeypatch.setattr(job, "samples", Looked)
    monkeypatch.setattr(job.workers, "run", lambda jobs: None)
    with pytest.raises(KeyboardInterrupt):
        job.work.step("train", job.train)
    job.work.step("train", job.train)
    assert len(trained) == 4 and looked == [job.first_look]


@pytest.mark.parametrize("ignored", [False, True], ids=["closed", "with nohup"])
def test_a_closed_terminal_interrupts(tmp_path, ignored):
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from studies.running import exit_status\n"
        "def action():\n    os.kill(os.getpid(), signal.SIGHUP); return 'to its end'\n"
        "sys.exit(exit_status(action, Path()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": PATH},
        preexec_fn=lambda: signal.signal(
            signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL
        ),
    )
    assert (done.returncode, done.stdout) == ((0, "to its end") if ignored else (130, ""))


@pytest.mark.parametrize(
    "options, message",
    [
        (("--updates", "0"), "--updates of at least 1"),
        (("--seed", "-1"), "--seed of at least 0"),
        (("--dim", "18"), "--dim divisible by 4"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        quickstart.settings_of(quickstart.parse_arguments(options, CORPUS))


def test_commands_to_try_can_be_pasted_whatever_the_folder_is_called():
    (line,) = (
        line for line in quickstart.what_next(Path("it's a")).split("\n") if "export" in line
    )
    assert shlex.split(line)[-2:] == [
        "it's a/spectrum_control/checkpoints/checkpoint_best.pt",
        "plain.pt",
    ]


FIGURES = {
    # row of the README: from results.json, from a report's measures, tolerance
    "sacreBLEU": (lambda r: r["bleu"], None, {"abs": 1.0}),
    "chrF": (lambda r: r["chrf"], None, {"abs": 1.0}),
    "validation perplexity": (lambda r: r["valid_ppl"], None, {"rel": 0.02}),
    "I1, both signs (1 = isotropic)": (
        lambda r: r["isotropy_as_is"]["I1_both_signs"],
        lambda m: m["i1"],
        {"rel": 0.03},
    ),
    "I2, both signs (0 = isotropic)": (
        lambda r: r["isotropy_as_is"]["I2_both_signs"],
        lambda m: m["i2"],
        {"rel": 0.05},
    ),
    "sigma_d / sigma_1": (
        lambda r: r["sigma_last_to_first"],
        lambda m: m["sigma_min"] / m["sigma_max"],
        {"rel": 0.03},
    ),
    "mean cosine": (lambda r: r["mean_cosine"], lambda m: m["mean_cosine"], {"rel": 0.05}),
}


def figures_of_the_readme():
    """Row -> figures of the recipes, in their order."""
    text = (EXAMPLES / "quickstart" / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    found = {name: (float(plain), float(control)) for name, plain, control in rows}
    assert set(found) == set(FIGURES)
    return found


def test_the_readme_has_the_figures_of_the_report_that_is_shown():
    """The page of the documentation site is drawn from this file, which is of the same recipes."""
    path = EXAMPLES.parent / "docs" / "quickstart_report.json"
    checkpoints = json.loads(path.read_text("utf-8"))["checkpoints"]
    assert [one["label"] for one in checkpoints] == list(quickstart.LABELS.values())
    for name, told in figures_of_the_readme().items():
        _, measured, tolerance = FIGURES[name]
        if measured is not None:
            for one, value in zip(checkpoints, told):
                assert value == pytest.approx(measured(one["measures"]), **tolerance), name


def test_the_readme_has_the_figures_of_a_finished_quickstart():
    """make quickstart-long writes this record; without one there is nothing to compare."""
    path = EXAMPLES.parent / "quickstart-long" / "results.json"
    if not path.exists():
        pytest.skip("run make quickstart-long first")
    record = json.loads(path.read_text("utf-8"))
    default = quickstart.settings_of(quickstart.parse_arguments(["--cpu", "--long"], CORPUS))
    if record["settings"] != dataclasses.asdict(default):
        pytest.skip("the record in quickstart-long/ has other settings than the README")
    for name, told in figures_of_the_readme().items():
        written, _, tolerance = FIGURES[name]
        for figures, value in zip(record["recipes"].values(), told):
            assert value == pytest.approx(written(figures), **tolerance), name


def test_samples_are_not_chosen_among_empty_lines(tmp_path):
    for folder in ("text", "subwords"):
        (tmp_path / folder).mkdir()
        for language in ("de", "en"):
            lines = f"\n{' '.join(['wort'] * 12)}\n \n"
            (tmp_path / folder / f"test.{language}").write_text(lines)
    data = types.SimpleNamespace(
        **{"work": WorkDir(tmp_path), "source": "de", "target": "en"},
        **{"text": tmp_path / "text", "subwords": tmp_path / "subwords"},
    )
    run = types.SimpleNamespace(best=tmp_path / "best.pt")
    assert quickstart.Samples(data, run, "cpu").chosen == [1]


def test_missing_package_is_named(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "sacrebleu" else found(name)
    )
    with pytest.raises(ConfigurationError, match="package sacrebleu"):
        machine.check_installation()


@pytest.mark.slow
def test_error_is_one_line_before_anything_is_written(tmp_path):
    status, _, err = finish(start(tmp_path, "--corpus", "nowhere"))
    assert status == 1
    assert err.startswith("error: expected") and "no such folder" in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
