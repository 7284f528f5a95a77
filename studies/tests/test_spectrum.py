"""The study of spectrum control at a tiny size, and its page."""

import json
import os
import shutil
import sys

import pytest
import torch
from fairseq import options

import spectral_fairseq.plugin  # noqa: F401 (registers what the commands name)
from studies.json_lines import read_records
from studies.running import Usage
from studies.spectrum import __main__ as spectrum_study
from studies.spectrum import report as spectrum_report
from studies.spectrum import training as spectrum_training
from studies.spectrum.grid import TASKS, VARIANTS, suits
from studies.spectrum.training import SpectrumRun
from studies.work_folder import WorkDir


@pytest.mark.slow
@pytest.mark.usefixtures("forked_commands")
def test_spectrum_study_trains_resumes_and_tabulates(tmp_path, monkeypatch, capsys, request):
    """Every variant's command is one that fairseq takes; one is trained, with tiny data."""
    data, corpora = tmp_path / "data", ("translation", "language_model")
    data.mkdir()
    for name, made in zip(corpora, ("tiny_translation_data", "tiny_lm_data")):
        (data / name).symlink_to(request.getfixturevalue(made))
    one = TASKS["translation"]
    small = one._replace(flags=one.flags.replace("embed-dim 64", "embed-dim 16"))
    monkeypatch.setitem(TASKS, "translation", small)
    monkeypatch.setattr(spectrum_training, "WINDOW", 2)
    argv = ["spectrum_study", "--work-dir", tmp_path, "--tasks", "translation", "--updates", 2]
    argv += ["--variants", "plain", "both_fixed", "--seeds", 1, "--results", tmp_path / "out.jsonl"]
    monkeypatch.setattr(sys, "argv", [str(argument) for argument in argv])
    for again in range(2):
        if again:  # what is recorded is not trained again
            shutil.rmtree(tmp_path / "runs")
            monkeypatch.setattr(spectrum_study, "SpectrumRun", None)
        spectrum_study.main()
        plain, ours = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
        assert plain["variant"] == "plain" and plain["behind"] == 0
        assert ours["variant"] == "both_fixed" and ours["sigma_1_to_rms"] > 1
    records = spectrum_report.recorded(tmp_path / "out.jsonl")
    assert [len(one["curve"]) for one in records] == [1, 1]
    page = tmp_path / "page.md"
    page.write_text("<!-- generated: spectrum_study -->\nold\n<!-- /generated -->\n")
    spectrum_report.write_page(records, page, tmp_path)
    assert "| both fixed: `--spectrum-decay 0.01 --spectrum-side both" in page.read_text()
    assert "old" not in page.read_text()
    assert (tmp_path / "spectrum-forms.png").stat().st_size > 10_000
    for task in TASKS:
        for variant in VARIANTS:
            if suits(task, variant):
                run = SpectrumRun((task, variant, 1), WorkDir(tmp_path), 2)
                options.parse_args_and_arch(options.get_training_parser(), run.train_command[1:])


def test_a_training_that_ended_is_recorded_and_not_trained_again(tmp_path, monkeypatch):
    """Two trainings, and a disk that is full when the first one's record is written."""
    started = []
    argv = ["spectrum_study", "--work-dir", tmp_path, "--tasks", "awd_lstm", "--updates", 2]
    argv += ["--variants", "plain", "--seeds", 1, 2, "--results", tmp_path / "out.jsonl"]
    monkeypatch.setattr(sys, "argv", [str(argument) for argument in argv])
    monkeypatch.setattr(spectrum_study, "prepare", lambda *_: None)
    monkeypatch.setattr(spectrum_study, "recorded", lambda path: read_records(path))
    monkeypatch.setattr(spectrum_study, "rows", lambda _: [])
    monkeypatch.setattr(spectrum_study, "markdown", lambda _: "")
    record = {"task": "awd_lstm", "variant": "plain"}
    monkeypatch.setattr(SpectrumRun, "record", lambda run: {**record, "seed": run.seed})

    def run_jobs(jobs, lock_fd, on_end, **_):
        assert os.fstat(lock_fd)  # which a training inherits
        for job in jobs:
            started.append(job.label)
            last = job.log.parent / "checkpoints" / "checkpoint_last.pt"
            last.parent.mkdir()
            torch.save({"model": {}, "optimizer_history": [{"num_updates": 2}]}, last)
            on_end(job, Usage(0, 1, 1.0))

    monkeypatch.setattr(spectrum_study, "run_jobs", run_jobs)
    with monkeypatch.context() as full:
        full.setattr(spectrum_study, "add_records", None)
        with pytest.raises(TypeError):
            spectrum_study.main()
    assert list(tmp_path.rglob("checkpoint_last.pt"))
    spectrum_study.main()
    assert started == ["awd_lstm plain 1", "awd_lstm plain 2"]
    assert [one["seed"] for one in read_records(tmp_path / "out.jsonl")] == [1, 2]
    assert not list(tmp_path.rglob("*.pt"))


def test_the_spectrum_study_compares_with_plain_of_the_same_seed():
    measures = {"mean_cosine": 0.0, "sigma_1_to_rms": 1.0, "sigma_d_to_sigma_1": 1.0}
    losses = {"plain": [(5, 4), (7, 6)], "default": [(5.5, 4.5), (7.1, 6.1)], "both_free": [(7, 3)]}
    records = [
        {
            **{"task": "awd_lstm", "variant": variant, "seed": seed, **measures},
            "curve": [{"update": 300 * at, "nll_bits": loss} for at, loss in enumerate(curve, 1)],
        }
        for variant, curves in losses.items()
        for seed, curve in enumerate(curves)
    ]
    plain, default, both = spectrum_report.rows(records)
    assert (plain["behind"], plain["deviation"]) == (0, pytest.approx(2**0.5))
    assert (default["behind"], default["deviation"]) == pytest.approx((0.3, 0.08**0.5))
    assert (both["behind"], both["most_behind"], both["deviation"]) == (-1, 2, None)
    assert default["curve"] == pytest.approx({300: 0.3, 600: 0.3})
    assert default["beside_plain"] and not both["beside_plain"]  # 2 is more than plain's 1.4


def test_the_page_of_the_spectrum_study_has_what_the_records_say():
    page = spectrum_report.PAGE.read_text("utf-8")
    assert page.count("<!-- generated: spectrum_") == 2
    assert spectrum_report.page_text(spectrum_report.recorded()) == page


def test_short_trials_do_not_enter_the_records_of_the_page(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["spectrum_study", "--updates", "300"])
    with pytest.raises(SystemExit):
        spectrum_study.main()
    assert "expected --results FILE beside --updates" in capsys.readouterr().err
