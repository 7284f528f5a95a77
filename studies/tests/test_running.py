"""Work folders, jobs that run side by side, and the logs of fairseq-train that they leave."""

import json
import os
import signal
import time

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError, DataError
from studies import (
    machine,
    quickstart_figures,
    running,
    training,
    training_log,
    translation,
)
from studies.work_folder import WorkDir, write_text


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


def test_time_and_memory_count_over_interruptions(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    run = training.TrainingRun("one", WorkDir(tmp_path), folder, [], tmp_path, 1, 1, [])
    run.training_ended(running.Usage(1, peak_bytes=5, processor_seconds=2.0))
    assert not run.is_trained()
    run.training_ended(running.Usage(0, peak_bytes=3, processor_seconds=1.5))
    assert run.is_trained()
    assert run.usage_figures() == {"peak_bytes": 5, "processor_seconds": 3.5}


def test_a_part_of_a_training_that_nobody_saw_end_makes_its_time_unknown(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    run = training.TrainingRun("one", WorkDir(tmp_path), folder, [], tmp_path, 1, 1, [])
    start = "2026-01-01 | INFO | fairseq_cli.train | training on 1 devices (GPUs/TPUs)\n"
    run.training_ended(running.Usage(1, peak_bytes=1, processor_seconds=0.5))  # before it began
    (folder / "train.log").write_text(start)
    run.training_ended(running.Usage(1, peak_bytes=3, processor_seconds=1.5))
    assert run.usage_figures() == {"peak_bytes": 3, "processor_seconds": 2.0}
    (folder / "train.log").write_text(2 * start)  # killed together with the run
    assert run.usage_figures() == {}
    (folder / "train.log").write_text(3 * start)
    run.training_ended(running.Usage(0, peak_bytes=3, processor_seconds=1.5))
    assert run.usage_figures() == {}


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
    *_, line = quickstart_figures.format_table(results, ["one", "other"], False).splitlines()
    assert line.split()[-3:] == ["2", "MiB", "unknown"]


def test_missing_command_is_named():
    with pytest.raises(ConfigurationError, match="fairseq-unheard-of"):
        machine.find_command("fairseq-unheard-of")


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
    assert training_log.read_training_log(path) == {
        "valid_ppl": 8.0,
        "best_update": 30,
        "updates": 40,
        "seconds_per_update": 2.0,
    }
    path.write_text("no training\n", "utf-8")
    with pytest.raises(DataError, match="0 timed intervals"):
        training_log.read_training_log(path)


def test_a_training_of_a_few_updates_is_timed_by_its_epochs(tmp_path):
    path = tmp_path / "train.log"
    valid = record("valid", valid_loss=6, valid_nll_loss=5, valid_ppl=32, valid_num_updates=5)
    cut_off = "2026-01-01 00:00:00 | INFO | train_inner | {" + record("config", seed=1)
    path.write_text("\n".join([cut_off, valid, record("train", train_ups=4)]), "utf-8")
    assert training_log.read_training_log(path)["seconds_per_update"] == 0.25


def test_training_progress():
    progress = training_log.TrainingProgress()
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
