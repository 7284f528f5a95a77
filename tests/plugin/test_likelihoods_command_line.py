"""Methods with a state of their own or two passes: two workers equal one, resume equals no stop."""

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint
from tests.conftest import PACKAGE, TINY_TRANSLATION
from tests.plugin.trainers import same_states

COMMON = ("regularized_cross_entropy", "--share-all-embeddings", "--label-smoothing", "0.1")
GATING = ("--gradient-gating", "1.5", "--gradient-gating-memory", "2")
# A large eps, because Adam would otherwise turn rounding into steps of full length.
COUPLED = ("--optimizer", "coupled_adam", "--weight-decay", "0.1", "--adam-eps", "0.001")
RESUMED = {
    "gradient gating": ("transformer", *COMMON, *GATING),
    "coupled_adam, whose decay is that of an SVD table": ("transformer_sc", *COMMON, *COUPLED),
    "SimCut": ("transformer", *COMMON, "--simcut-weight", "3"),
}
TWO_WORKERS = {
    "gradient gating": ("transformer", *COMMON, *GATING, "--optimizer", "sgd", "--lr", "0.1"),
    "coupled_adam": ("transformer_sc", *COMMON, *COUPLED),
}


def model_of(folder):
    return load_checkpoint(folder / "checkpoint_last.pt")["model"]


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_equals_uninterrupted(name, train):
    """In the middle of an epoch, when some words have been counted."""
    run = (*RESUMED[name], "--max-epoch", "3", "--cpu")
    through = model_of(train(*run, "--max-update", 7))
    half = train(*run, "--max-update", 3)
    resumed = model_of(
        train(*run, "--max-update", 7, "--restore-file", half / "checkpoint_last.pt")
    )
    assert not same_states(model_of(half), through)
    assert same_states(resumed, through)


def test_gates_and_coupling_change_the_training(train):
    """So that the other tests compare what they mean to compare."""
    exact = (*COMMON, "--loss-form", "dense")  # of which rounding is no part
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
    arch, *flags = TWO_WORKERS[name]
    more = ("--batch-size", "6", "--max-tokens", "1000", "--max-epoch", "2", "--max-update", "6")
    more += ("--dropout", "0", "--no-epoch-checkpoints")
    one = train(arch, *flags, "--update-freq", "2", *more)
    two = tmp_path / "two"
    run_on_two_workers(
        *(tiny_translation_data, "--user-dir", PACKAGE, "--save-dir", two, "--arch", arch),
        *("--task", "translation", "--source-lang", "de", "--target-lang", "en"),
        *(*TINY_TRANSLATION, "--optimizer", "adam", "--lr", "0.005", "--seed", "1"),
        *("--criterion", *flags, *more),
    )
    first, second = model_of(one), model_of(two)
    for key in first:
        torch.testing.assert_close(first[key], second[key], rtol=1e-4, atol=1e-5)
