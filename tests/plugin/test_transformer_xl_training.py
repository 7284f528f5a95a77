"""Transformer-XL through the command line: trained, resumed, evaluated, sampled from."""

import json
import math
import re

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint
from tests.conftest import PACKAGE

pytestmark = pytest.mark.slow

TINY = ("--task", "stateful_language_modeling", "--cpu", "--tokens-per-sample", "10")
TINY += ("--batch-size", "3", "--batch-size-valid", "2", "--mem-len", "10")
TINY += ("--decoder-embed-dim", "12", "--decoder-attention-heads", "2", "--decoder-layers", "2")
TINY += ("--decoder-ffn-embed-dim", "20", "--adaptive-softmax-cutoff", "10,20,30")
TINY += ("--embedding-type", "svd", "--spectrum-prior", "polynomial")
TINY += ("--lr-scheduler", "cosine", "--clip-norm", "0.25")
TINY += ("--max-update", "100", "--max-epoch", "2", "--save-interval-updates", "4")


@pytest.fixture(scope="module")
def trained(train):
    """Two epochs with spectrum control, with checkpoints in the middle of the second one."""
    return train("transformer_xl_wt103_small", "spectrum_control", *TINY)


def figures(folder):
    log = (folder / "log.txt").read_text("utf-8")
    return [dict(re.findall(r"(\w+) ([\d.]+)", x)) for x in re.findall(r"\| valid \|(.*)", log)]


def test_resumed_in_the_middle_of_an_epoch_equals_uninterrupted(trained, train):
    log = (trained / "log.txt").read_text("utf-8")
    assert re.search(r"\| train \|.*spectrum [\d.]+ .*orthogonality [\d.]+", log)
    half = trained / sorted(path.name for path in trained.glob("checkpoint_2_*.pt"))[-1]
    more = ("--restore-file", half)
    resumed = train("transformer_xl_wt103_small", "spectrum_control", *TINY, *more)
    expected, found, before = (
        load_checkpoint(path)["model"]
        for path in (trained / "checkpoint_last.pt", resumed / "checkpoint_last.pt", half)
    )
    assert any(not torch.equal(before[key], expected[key]) for key in before)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert figures(resumed)[-1]["ppl"] == figures(trained)[-1]["ppl"]


def test_evaluation_with_the_memory_of_training_and_a_longer_one(trained, run_cli, tiny_lm_data):
    def perplexity(overrides, *more):
        done = run_cli(
            *("spectral-fairseq", "evaluate-lm", trained / "checkpoint_last.pt", tiny_lm_data),
            *("--model-overrides", overrides, "--format", "json", "--cpu", *more),
        )
        return json.loads(done.stdout)["figures"][0]["perplexity"]

    as_trained = perplexity("{}", "--streams", "2", "--segment", "10")
    assert as_trained == pytest.approx(float(figures(trained)[-1]["ppl"]), abs=0.02)
    published = "{'mem_len': 20, 'clamp_len': 6, 'same_length': True}"
    longer = [perplexity(published, "--segment", segment) for segment in ("4", "7")]
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
    (tmp_path / "start.txt").write_text("w1 w2 w3\nw4\n")
    done = run_cli(
        *("fairseq-interactive", tiny_lm_data, "--path", path, *user_dir, "--cpu"),
        *("--task", "language_modeling", "--input", tmp_path / "start.txt", "--buffer-size", "2"),
        *("--sampling", "--sampling-topk", "5", "--beam", "2", "--max-len-b", "14", "--nbest", "2"),
    )
    samples = re.findall(r"^H-(\d+)\t\S+\t(.*)$", done.stdout, re.MULTILINE)
    assert [number for number, _ in samples] == ["0", "0", "1", "1"]
    assert all(text.startswith(("w1 w2 w3", "w4")[int(number)]) for number, text in samples)
