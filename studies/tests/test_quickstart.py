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
from pathlib import Path

import pytest
import torch

import spectral_fairseq
from spectral_fairseq.errors import ConfigurationError, DataError
from studies import corpus, quickstart, running, training, translation
from studies.running import WorkDir, write_text
from tests.conftest import PACKAGE

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


CORPUS = EXAMPLES / "data" / "opendocs_de_en"

PATH = os.pathsep.join(
    (str(PACKAGE.parent), str(EXAMPLES.parent), os.environ.get("PYTHONPATH", ""))
)
PAIRS = {"train": 400, "valid": 12, "test": 7}
OPTIONS = ("--updates", "60", "--vocabulary", "400", "--dim", "16", "--cpu")


# -- the work folder


def test_step_is_done_once_and_a_failed_one_again(tmp_path):
    work, calls = WorkDir(tmp_path), []

    def action():
        calls.append(1)
        if len(calls) == 1:
            time.sleep(0.2)
            raise RuntimeError
        return {"figure": 7}

    with pytest.raises(RuntimeError):
        work.step("one", action)
    assert not work.is_done("one")
    assert work.step("one", action)["figure"] == 7
    assert WorkDir(tmp_path).step("one", action)["figure"] == 7
    assert len(calls) == 2
    assert work.result("one")["seconds"] >= 0.2  # of both attempts


def test_other_settings_are_refused_and_named(tmp_path):
    WorkDir(tmp_path).keep_settings({"seed": 1, "updates": 5})
    WorkDir(tmp_path).keep_settings({"seed": 1, "updates": 5})
    with pytest.raises(ConfigurationError, match="seed 1 -> 2") as caught:
        WorkDir(tmp_path).keep_settings({"seed": 2, "updates": 5})
    assert "updates" not in str(caught.value)
    (tmp_path / "settings.json").write_text("{", "utf-8")
    with pytest.raises(ConfigurationError, match="not JSON"):
        WorkDir(tmp_path).keep_settings({"seed": 1})


def test_second_run_in_the_same_folder_is_refused(tmp_path):
    with WorkDir(tmp_path).locked():
        with pytest.raises(ConfigurationError, match="no other run"), WorkDir(tmp_path).locked():
            pass
    with WorkDir(tmp_path).locked():
        pass


def test_what_cannot_be_a_work_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for name, message in (("file", "found a file"), ("a:b", "without ':' in its name")):
        with pytest.raises(ConfigurationError, match=message), WorkDir(tmp_path / name).locked():
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "settings.json").write_text("[1]", "utf-8")
    with pytest.raises(ConfigurationError, match="no settings"):
        WorkDir(tmp_path).keep_settings({"seed": 1})


def test_lack_of_disk_space_is_found_first(tmp_path):
    WorkDir(tmp_path).need_space(1)
    with pytest.raises(DataError, match="free disk space"):
        WorkDir(tmp_path).need_space(10**18)


def test_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_text(path, "old")

    def no_replace(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", no_replace)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert path.read_text("utf-8") == "old"


# -- running commands


def job(script, tmp_path, label="job", progress=lambda line: None):
    return running.Job(
        label, ["sh", "-c", script], tmp_path / f"{label}.log", 4, " lines", progress
    )


def run(work_jobs, tmp_path, at_once=2, **options):
    fd = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    try:
        running.run_jobs(work_jobs, at_once=at_once, threads=3, gpu=False, lock_fd=fd, **options)
    finally:
        os.close(fd)


def test_jobs_get_their_threads_no_gpu_and_a_log(tmp_path):
    ended = []
    script = "echo threads=$OMP_NUM_THREADS cuda=[$CUDA_VISIBLE_DEVICES]; echo error >&2"
    run([job(script, tmp_path)], tmp_path, on_end=lambda job, usage: ended.append(usage))
    assert (tmp_path / "job.log").read_text() == "threads=3 cuda=[]\nerror\n"
    assert ended[0].exit_status == 0
    assert ended[0].peak_bytes > 100_000


def test_jobs_keep_freed_memory_unless_the_user_decided_otherwise(tmp_path, monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")
    run([job("echo $MALLOC_MMAP_THRESHOLD_ $MALLOC_TRIM_THRESHOLD_", tmp_path)], tmp_path)
    assert (tmp_path / "job.log").read_text() == f"{2**34} 7\n"


@pytest.mark.parametrize("at_once", [2, 1])
def test_failure_shows_the_end_of_the_log_and_stops_the_others(tmp_path, at_once):
    ended = {}
    begin = time.monotonic()
    with pytest.raises(running.JobFailed, match="exit status 3") as caught:
        run(
            [
                job("echo what went wrong; exit 3", tmp_path, "bad"),
                job("sleep 60", tmp_path, "good"),
            ],
            tmp_path,
            at_once,
            on_end=lambda job, usage: ended.update({job.label: usage}),
        )
    assert "what went wrong" in str(caught.value)
    assert time.monotonic() - begin < 50
    assert ended["bad"].exit_status == 3
    if at_once == 2:
        assert ended["good"].exit_status == -signal.SIGTERM
    else:
        assert "good" not in ended


@pytest.mark.slow
def test_no_more_jobs_run_at_once_than_asked_for(tmp_path):
    script = "mkdir running-$$; ls -d running-* | wc -l; sleep 0.5; rmdir running-$$"
    names = [f"job{index}" for index in range(5)]
    run([job(f"cd {tmp_path}; {script}", tmp_path, name) for name in names], tmp_path, at_once=2)
    seen = [int((tmp_path / f"{name}.log").read_text()) for name in names]
    assert max(seen) == 2 and len(seen) == 5


@pytest.mark.slow
def test_progress_is_read_from_new_lines_only(tmp_path, capsys):
    (tmp_path / "job.log").write_text("line\n" * 3)  # of an earlier, interrupted run
    seen = []

    def progress(line):
        seen.append(line)
        return len(seen), "note"

    script = "printf 'a\\nb\\n'; sleep 1; printf 'c\\nd\\n'"
    run([job(script, tmp_path, progress=progress)], tmp_path)
    assert seen == ["a", "b", "c", "d"]
    assert "job: 4 of 4 lines  note" in capsys.readouterr().err


def test_a_training_that_ended_unseen_is_not_started_again(tmp_path):
    def trained(max_update):
        run = training.TrainingRun(
            "one", WorkDir(tmp_path), tmp_path / "one", [], tmp_path, 40, max_update, []
        )
        return run.is_trained()

    last = tmp_path / "one" / "checkpoints" / "checkpoint_last.pt"
    last.parent.mkdir(parents=True)
    assert not trained(40)
    torch.save({"model": {}, "optimizer_history": [{"num_updates": 40}]}, last)
    assert trained(40) and not trained(41)
    assert not trained(0)  # epochs decide, and fairseq stops at once after the last one
    last.write_bytes(b"damaged")
    assert not trained(40)


def test_a_recipe_that_was_changed_is_not_taken_for_the_old_one(tmp_path):
    def keep(*flags):
        folder = tmp_path / "one"
        run = training.TrainingRun("one", WorkDir(tmp_path), folder, [], tmp_path, 1, 1, flags)
        run.keep_flags()

    keep("--arch", "transformer")
    keep("--arch", "transformer")
    with pytest.raises(ConfigurationError, match="--arch transformer; found --arch transformer_sc"):
        keep("--arch", "transformer_sc")
    (tmp_path / "one" / "flags.json").unlink()
    WorkDir(tmp_path).mark_done("train_one", {})
    keep("--arch", "transformer_sc")  # trained by a version that kept no record
    assert not (tmp_path / "one" / "flags.json").exists()


def test_unknown_peak_memory_is_said_to_be_unknown():
    isotropy = {"I1_both_signs": 1.0, "I2_both_signs": 1.0}
    names = (
        "bleu",
        "chrf",
        "valid_ppl",
        "sigma_last_to_first",
        "mean_cosine",
        "seconds_per_update",
    )
    figures = {**dict.fromkeys(names, 1.0), "isotropy_as_is": isotropy}
    results = {"one": {**figures, "peak_bytes": 2**21}, "other": figures}
    *_, line = quickstart.format_table(results, ["one", "other"], False).splitlines()
    assert line.split()[-3:] == ["2", "MiB", "unknown"]


def test_missing_command_is_named():
    with pytest.raises(ConfigurationError, match="fairseq-unheard-of"):
        running.find_command("fairseq-unheard-of")


# -- reading fairseq's output


def record(kind, **figures):
    values = json.dumps({key: str(value) for key, value in figures.items()})
    return f"2026-01-01 00:00:00 | INFO | {kind} | {values}"


def test_figures_of_an_interrupted_and_resumed_training(tmp_path):
    path = tmp_path / "train.log"
    lines = [
        "anything",
        record("train_inner", num_updates=10, ups=0.5, ppl=90),
        record("valid", valid_loss=6, valid_nll_loss=5, valid_ppl=32, valid_num_updates=15),
        record("train_inner", num_updates=20, ups=0.25, ppl=80),
        "Traceback",
        "resumed",
        record("train_inner", num_updates=20, ups=0.5, ppl=80),
        record("valid", valid_loss=4, valid_nll_loss=3, valid_ppl=8, valid_num_updates=30),
        record("valid", valid_loss=4.5, valid_nll_loss=3.5, valid_ppl=11, valid_num_updates=40),
    ]
    path.write_text("\n".join(lines), "utf-8")
    assert training.read_training_log(path) == {
        "valid_ppl": 8.0,
        "best_update": 30,
        "updates": 40,
        "seconds_per_update": 2.0,
    }
    path.write_text("no training\n", "utf-8")
    with pytest.raises(DataError, match="0 timed intervals"):
        training.read_training_log(path)


def test_a_training_of_a_few_updates_is_timed_by_its_epochs(tmp_path):
    path = tmp_path / "train.log"
    valid = record("valid", valid_loss=6, valid_nll_loss=5, valid_ppl=32, valid_num_updates=5)
    cut_off = "2026-01-01 00:00:00 | INFO | train_inner | {" + record("config", seed=1)
    path.write_text("\n".join([cut_off, valid, record("train", train_ups=4)]), "utf-8")
    assert training.read_training_log(path)["seconds_per_update"] == 0.25


def test_training_progress():
    progress = training.TrainingProgress()
    assert progress("no record") is None
    assert progress(record("train_inner", num_updates=10, ppl=90)) == (10, "ppl 90")
    valid = record("valid", valid_ppl=32, valid_loss=6)
    assert progress(valid) == (10, "ppl 90, valid ppl 32")


def test_translations_are_put_in_order_and_counted(tmp_path):
    path = tmp_path / "log"
    lines = ["H-1\t-1\t_b", "D-1\t-1.0\tb c", "P-1\t-1.0 -1.0", "other"]
    path.write_text("\n".join([*lines, "D-0\t-0.5\ta", "P-0\t-0.5", ""]), "utf-8")
    assert translation.read_translations(path, 2) == ["a", "b c"]
    with pytest.raises(DataError, match="3 translations"):
        translation.read_translations(path, 3)


def test_of_several_translations_the_length_penalty_chooses(tmp_path):
    path = tmp_path / "log"
    short, long = ["D-0\t-1\ta", "P-0\t-1.0 -1.0"], ["D-0\t-0.7\ta b", "P-0\t-0.7 -0.7 -0.7"]
    path.write_text("\n".join(["S-0\tx", *long, *short]), "utf-8")
    assert translation.read_translations(path, 1) == ["a b"]  # -.7 against -1
    assert translation.read_translations(path, 1, 0.0) == ["a"]  # -2 against -2.1


# -- the report


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
        quickstart.draw_spectra(figures, {key: key for key in figures}, tmp_path / name)
        pictures.append((tmp_path / name / "spectra.svg").read_bytes())
        assert (tmp_path / name / "spectra.png").read_bytes().startswith(b"\x89PNG")
    assert pictures[0] == pictures[1]


# -- the whole


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
    assert out.count("after 9  ") >= 3 and out.index("after 30  ") < out.index("random table")
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


def test_missing_package_is_named(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "sacrebleu" else found(name)
    )
    with pytest.raises(ConfigurationError, match="package sacrebleu"):
        running.check_installation()


@pytest.mark.slow
def test_error_is_one_line_before_anything_is_written(tmp_path):
    status, _, err = finish(start(tmp_path, "--corpus", "nowhere"))
    assert status == 1
    assert err.startswith("error: expected") and "no such folder" in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
