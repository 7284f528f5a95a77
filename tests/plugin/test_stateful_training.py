"""Stateful models through the command line: resuming, workers, evaluation and generation."""

import json
import math
import re

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint
from tests.conftest import PACKAGE, train_command
from tests.plugin.test_command_line import samples
from tests.plugin.test_same_training import weights_of

pytestmark = pytest.mark.slow

TINY = ("--task", "stateful_language_modeling", "--cpu", "--tokens-per-sample", "10")
TINY += ("--decoder-embed-dim", "12", "--decoder-hidden-size", "14", "--decoder-layers", "2")
TINY += ("--optimizer", "sgd", "--lr", "5", "--max-update", "100", "--max-epoch", "2")
NO_DROPOUT = ("--dropout", "0", "--input-dropout", "0", "--hidden-dropout", "0")
NO_DROPOUT += ("--word-dropout", "0", "--weight-drop", "0")
ARCH, CRITERION = "awd_lstm_wt2", "mle_cosreg"
BATCHES = ("--batch-size", "3", "--batch-size-valid", "2")
SLOTS = (*BATCHES, "--update-freq", "2", "--variable-bptt")
XL = ("--task", "stateful_language_modeling", "--cpu", "--tokens-per-sample", "10", *BATCHES)
XL += ("--mem-len", "10", "--decoder-embed-dim", "12", "--decoder-attention-heads", "2")
XL += ("--decoder-layers", "2", "--decoder-ffn-embed-dim", "20", "--clip-norm", "0.25")
XL += ("--adaptive-softmax-cutoff", "10,20,30", "--lr-scheduler", "cosine")
XL += ("--embedding-type", "svd", "--spectrum-prior", "polynomial")
XL += ("--max-update", "100", "--max-epoch", "2")
# Two epochs of several updates, with checkpoints in the middle of the second one.
RUNS = {
    "awd-lstm": (ARCH, CRITERION, *TINY, *SLOTS, "--save-interval-updates", "2"),
    "xl": ("transformer_xl_wt103_small", "spectrum_control", *XL, "--save-interval-updates", "4"),
}


def figures(folder, kind):
    """What was logged after each epoch, without times."""
    log = (folder / "log.txt").read_text("utf-8")
    lines = re.findall(rf"\| {kind} \| epoch (.*)", log)
    return [re.findall(r"\b(loss|ppl|wpb|bsz|lr|num_updates) ([\d.]+)", line) for line in lines]


def in_the_second_epoch(folder):
    """The first checkpoint in the middle of it."""
    return min(folder.glob("checkpoint_2_*.pt"), key=lambda path: int(path.stem.split("_")[-1]))


@pytest.mark.parametrize("name, slots", [("awd-lstm", 2), ("xl", 1)])
def test_resumed_equals_uninterrupted(name, slots, train):
    """In the second epoch, with dropout and drawn lengths: every parameter bit for bit."""
    through = train(*RUNS[name])
    half = in_the_second_epoch(through)
    state = load_checkpoint(half)["extra_state"]["train_iterator"]
    assert len(state["streams"]["states"]) == slots and state["epoch"] == 2
    resumed = train(*RUNS[name], "--restore-file", half)
    expected, found = (weights_of(f) for f in (through, resumed))
    before = weights_of(half)
    assert any(not torch.equal(before[key], expected[key]) for key in before)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    for kind in ("valid", "train"):
        assert figures(resumed, kind)[-1] == figures(through, kind)[-1]
    assert "afresh" not in (resumed / "log.txt").read_text("utf-8")


@pytest.fixture(scope="module")
def through(train):
    return train(*RUNS["awd-lstm"])


def test_logs(through, tiny_lm_data):
    log = (through / "log.txt").read_text("utf-8")
    tokens = len((tiny_lm_data / "train.txt").read_text("utf-8").replace("\n", " \n ").split(" "))
    (said,) = re.findall(r"training on 6 streams of (\d+) tokens; (\d+) of (\d+) tokens", log)
    length, trimmed, total = map(int, said)
    assert total == 6 * length + trimmed and trimmed < 6 and abs(total - tokens) <= 1
    inner = re.findall(r"train_inner \| epoch (\d+).*? wpb=([\d.]+), bsz=6, .* lr=([\d.]+),", log)
    for epoch in ("001", "002"):
        assert sum(float(wpb) for e, wpb, _ in inner if e == epoch) == 6 * length
    assert {rate for _, _, rate in inner} == {"5"}


def test_validate_repeats_the_training_loops_figures(through, tiny_lm_data, run_cli):
    done = run_cli(
        *("fairseq-validate", tiny_lm_data, "--path", through / "checkpoint_last.pt", "--cpu"),
        *("--user-dir", PACKAGE, "--task", "stateful_language_modeling", "--batch-size", "2"),
        *("--num-workers", "0", "--log-format", "simple"),
    )
    pattern = r"valid on 'valid' subset .*?loss ([\d.]+) .*ppl ([\d.]+)"
    (found,) = re.findall(pattern, done.stdout + done.stderr)
    during = dict(figures(through, "valid")[-1])
    assert found == (during["loss"], during["ppl"])


def test_two_workers_equal_one_with_two_slots(train, tiny_lm_data, run_on_two_workers, tmp_path):
    """And a checkpoint of the two is continued by the one, carried states included."""
    more = (*NO_DROPOUT, "--variable-bptt", "--save-interval-updates", "2")
    two = tmp_path / "two"
    printed = run_on_two_workers(
        *train_command(tiny_lm_data, two, ARCH, CRITERION, *TINY, *more, *BATCHES)
    )
    (two / "log.txt").write_text(printed, "utf-8")

    half = in_the_second_epoch(two)
    streams = load_checkpoint(half)["extra_state"]["train_iterator"]["streams"]
    assert len(streams["states"]) == 2
    more += ("--batch-size", "3", "--batch-size-valid", "4", "--update-freq", "2")
    one = train(ARCH, CRITERION, *TINY, *more, "--restore-file", half)
    assert "afresh" not in (one / "log.txt").read_text("utf-8")
    found, expected = (weights_of(f) for f in (one, two))
    before = weights_of(half)
    assert any((before[key] - expected[key]).abs().max() > 1e-3 for key in before)
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-6)
    first, second = (float(dict(figures(f, "valid")[-1])["loss"]) for f in (one, two))
    assert first == pytest.approx(second, abs=2e-3)


@pytest.fixture(scope="module")
def trained(train):
    """With spectrum control."""
    folder = train(*RUNS["xl"])
    log = (folder / "log.txt").read_text("utf-8")
    assert re.search(r"\| train \|.*spectrum [\d.]+ .*orthogonality [\d.]+", log)
    return folder


def test_evaluation_with_the_memory_of_training_and_a_longer_one(trained, run_cli, tiny_lm_data):
    def evaluated(overrides, *more):
        done = run_cli(
            *("spectral-fairseq", "evaluate-lm", trained / "checkpoint_last.pt", tiny_lm_data),
            *("--model-overrides", overrides, "--format", "json", "--cpu", *more),
        )
        return json.loads(done.stdout)["figures"][0]["perplexity"]

    as_trained = evaluated("{}", "--streams", "2", "--segment", "10")
    assert as_trained == pytest.approx(float(dict(figures(trained, "valid")[-1])["ppl"]), abs=0.02)
    published = "{'mem_len': 20, 'clamp_len': 6, 'same_length': True}"
    longer = [evaluated(published, "--segment", segment) for segment in ("4", "7")]
    # With same_length the cuts between segments do not matter.
    assert math.isfinite(longer[0]) and longer[0] == pytest.approx(longer[1], rel=1e-5)
    assert abs(longer[0] - as_trained) > 1e-4


def test_the_hosts_programs_score_and_sample(trained, run_cli, tiny_lm_data, tmp_path):
    path, user_dir = trained / "checkpoint_last.pt", ("--user-dir", PACKAGE)
    done = run_cli(
        *("fairseq-eval-lm", tiny_lm_data, "--path", path, *user_dir, "--gen-subset", "valid"),
        *("--tokens-per-sample", "16", "--batch-size", "2", "--cpu"),
    )
    assert math.isfinite(float(re.search(r"Perplexity: ([\d.]+)", done.stdout + done.stderr)[1]))
    samples(run_cli, tiny_lm_data, path, tmp_path, "14")
