"""Through the command line: a resumed run equals an uninterrupted one, and two workers one."""

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint
from tests.conftest import TINY_TRANSLATION
from tests.plugin.trainers import same_states

CRITERION, SHARED = "regularized_cross_entropy", "--share-all-embeddings"
SMOOTHED = (CRITERION, SHARED, "--label-smoothing", "0.1")
GATING = ("--gradient-gating", "1.5", "--gradient-gating-memory", "2")
# A large eps, because Adam would otherwise turn rounding into steps of full length.
COUPLED = ("--optimizer", "coupled_adam", "--weight-decay", "0.1", "--adam-eps", "0.001")
SGD = ("--optimizer", "sgd", "--lr", "0.1")
CONTROL = ("--spectrum-decay", "0.3", "--spectrum-decay-interval", "2", "--table-centering", "0.1")
# With a prior that refers to the norm of the start.
FIXED = (*CONTROL, "--spectrum-side", "both", "--spectrum-scale", "fixed", "--spectrum-c2", "0.05")
# Of a table that is off its constraint set.
FACTORS = ("--orthogonality-weights", "0.1,0.1,0.1,0.1", "--spectrum-weight", "0.1")
RESUMED = {
    "penalties on factors": ("transformer_sc", "spectrum_control", SHARED, *FACTORS),
    "renewed factors": (
        *("transformer_sc", CRITERION, SHARED, "--svd-interval", "2", "--spectrum-weight", "0.1"),
    ),
    "decoupled control": ("transformer", CRITERION, SHARED, *FIXED),
    "decoupled control with adafactor": (
        *("transformer_sc", CRITERION, SHARED, *FIXED, "--embedding-type", "plain"),
        *("--optimizer", "adafactor"),
    ),
    "gradient gating": ("transformer", *SMOOTHED, *GATING),  # when some words have been counted
    "coupled_adam, whose decay is that of an SVD table": ("transformer_sc", *SMOOTHED, *COUPLED),
    "SimCut": ("transformer", *SMOOTHED, "--simcut-weight", "3"),
    "fast dropout": ("transformer", CRITERION, SHARED, "--fast-dropout", "--dropout", "0.3"),
}
ALL = (*FACTORS, "--cosreg-weight", "1", "--weight-norm-weight", "0.1", *SGD)
# Arguments of a training of three updates, or of six; the tolerance of its weights
SHORT, LONG = ("--max-update", "3"), ("--max-epoch", "2", "--max-update", "6")
TWO_WORKERS = {
    **{
        criterion: (("transformer_sc", criterion, SHARED, *ALL, *SHORT), 1e-6)
        for criterion in ("spectrum_control", "mle_cosreg", "weight_norm")
    },
    "decoupled control": (
        ("transformer", CRITERION, SHARED, *FIXED, "--spectrum-decay-interval", "1", *SGD, *SHORT),
        1e-6,
    ),
    "renewed factors": (
        ("transformer_sc", CRITERION, SHARED, "--svd-interval", "1", *SGD, *SHORT),
        1e-6,
    ),
    "gradient gating": (("transformer", *SMOOTHED, *GATING, *SGD, *LONG), 1e-5),
    "coupled_adam": (("transformer_sc", *SMOOTHED, *COUPLED, *LONG), 1e-5),
}
# A plugin that writes down, after each update, what each worker's model is.
WATCHING = """
import hashlib
from pathlib import Path
import spectral_fairseq.plugin
from fairseq.trainer import Trainer

train_step = Trainer.train_step

def watched(self, *args, **kwargs):
    result = train_step(self, *args, **kwargs)
    parts = [one.detach().numpy().tobytes() for one in self.get_model().parameters()]
    with open(Path(__file__).with_name(f"{self.data_parallel_rank}.txt"), "a") as file:
        file.write(hashlib.sha256(b"".join(parts)).hexdigest() + "\\n")
    return result

Trainer.train_step = watched
"""


def model_of(folder):
    return load_checkpoint(folder / "checkpoint_last.pt")["model"]


def same_trainings(first, second):
    return same_states(model_of(first), model_of(second))


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_equals_uninterrupted(name, train):
    """In the middle of an epoch."""
    run = (*RESUMED[name], "--max-epoch", "3", "--cpu")
    through = train(*run, "--max-update", 7)
    half = train(*run, "--max-update", 3)
    resumed = train(*run, "--max-update", 7, "--restore-file", half / "checkpoint_last.pt")
    assert not same_trainings(half, through)
    assert same_trainings(resumed, through)


def test_weight_norm_schedule_resumes_in_the_middle(train):
    """After two of four epochs of one batch each.

    fairseq composes batches anew for the epoch in which it resumes, and only for that one, so
    that a run over several batches an epoch does not repeat itself even with its own archs.
    """
    run = ("transformer_wn", "weight_norm", SHARED)
    run += ("--weight-norm-gradient-epochs", "4", "--dropout", "0", "--max-tokens", "10000")
    run += ("--optimizer", "sgd", "--lr", "0.5", "--max-update", "9")
    through, half = train(*run, "--max-epoch", 4), train(*run, "--max-epoch", 2)
    restored = ("--restore-file", half / "checkpoint_last.pt")
    resumed = train(*run, "--max-epoch", 4, *restored)
    models = [model_of(folder) for folder in (through, half, resumed)]
    for key in models[0]:
        torch.testing.assert_close(models[2][key], models[0][key], rtol=1e-4, atol=1e-6)
    lengths = "decoder.embed_tokens.g"
    assert (models[0][lengths] - models[1][lengths]).abs().max() > 1e-4


def test_gates_and_coupling_change_the_training(train):
    """So that the other tests compare what they mean to compare."""
    exact = (*SMOOTHED, "--loss-form", "dense")  # of which rounding is no part
    plain = model_of(train("transformer", *exact, "--cpu"))
    half = ("--fp16", "--fp16-no-flatten-grads")
    for more in (GATING, ("--optimizer", "coupled_adam"), (*COUPLED, *half)):
        other = model_of(train("transformer", *exact, *more, "--cpu"))
        assert any(not torch.equal(plain[key], other[key].float()) for key in plain)
        assert all(value.isfinite().all() for value in other.values())


@pytest.mark.parametrize("name", TWO_WORKERS)
def test_two_workers_equal_one_with_update_freq_two(
    name, run_on_two_workers, train, tiny_translation_data, tmp_path
):
    (arch, *flags), tolerance = TWO_WORKERS[name]
    more = ("--batch-size", "6", "--max-tokens", "1000", "--dropout", "0", "--no-epoch-checkpoints")
    one = train(arch, *flags, "--update-freq", "2", *more)
    two, watching = tmp_path / "two", tmp_path / "watching"
    watching.mkdir()
    (watching / "__init__.py").write_text(WATCHING)
    run_on_two_workers(
        *(tiny_translation_data, "--user-dir", watching, "--save-dir", two, "--arch", arch),
        *("--task", "translation", "--source-lang", "de", "--target-lang", "en"),
        *(*TINY_TRANSLATION, "--optimizer", "adam", "--lr", "0.005", "--seed", "1"),
        *("--max-epoch", "1", "--criterion", *flags, *more),
    )
    first, second = model_of(one), model_of(two)
    for key in first:
        torch.testing.assert_close(first[key], second[key], rtol=10 * tolerance, atol=tolerance)
    after_each_update = [(watching / f"{rank}.txt").read_text().split() for rank in (0, 1)]
    assert after_each_update[0] == after_each_update[1]
    updates = int(flags[flags.index("--max-update") + 1])
    assert len(set(after_each_update[0])) == updates
