"""NT-ASGD through the command line: interrupted and resumed equals uninterrupted, bit for bit."""

import re

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.provenance import torch_release

ARCH = ("transformer_lm_sc", "cross_entropy", "--share-decoder-input-output-embed")
BOTH = ("--optimizer", "nt_asgd", "--lr-scheduler", "nt_asgd", "--weight-decay", "1e-4")
# One epoch is several updates; the rate is so high that the validation loss goes up and down.
# Without --grouped-shuffling fairseq composes new batches when it resumes, and only then.
RUN = (*ARCH, *BOTH, "--lr", "2.0", "--clip-norm", "1.0", "--max-update", "1000")
RUN += ("--grouped-shuffling",)
SAVING = ("--save-interval-updates", "3", "--nt-asgd-interval", "1", "--max-epoch", "8")


def switched_after(folder):
    """The epoch that the log names."""
    found = re.search(r"starts to average after epoch (\d+)", (folder / "log.txt").read_text())
    return int(found[1]) if found else None


@pytest.fixture(scope="module")
def through(train):
    folder = train(*RUN, *SAVING)
    # The switch must lie in the middle, or nothing is tested.
    assert 2 <= switched_after(folder) <= 6
    return folder


def saved(folder, name):
    return load_checkpoint(folder / name)


def last(folder):
    """Weights, optimiser's tensors and the schedule's state of the last checkpoint."""
    state = saved(folder, "checkpoint_last.pt")
    tensors = dict(state["model"])
    for key, values in state["last_optimizer_state"]["state"].items():
        tensors.update({f"{key}.{name}": value for name, value in values.items()})
    return tensors, state["optimizer_history"][-1]["lr_scheduler_state"]["history"]


def middle_of(folder, epoch):
    """A checkpoint of the middle of an epoch."""
    return sorted(folder.glob(f"checkpoint_{epoch}_*.pt"))[0]


@pytest.mark.parametrize("place", ["before the switch", "after the switch"])
def test_resumed_equals_uninterrupted(place, train, through):
    """Before: from the end of the very epoch whose loss causes the switch. After: mid-epoch."""
    switch = switched_after(through)
    if place == "before the switch":
        path = through / f"checkpoint{switch}.pt"
    else:
        path = middle_of(through, switch + 1)
    averaged = load_checkpoint(path)["last_optimizer_state"]["param_groups"][0]["averaged"]
    assert (averaged > 0) is (place == "after the switch")
    resumed = train(*RUN, *SAVING, "--restore-file", path)
    (ours, history), (theirs, expected) = last(resumed), last(through)
    assert history == expected and ours.keys() == theirs.keys()
    assert any(key.endswith(".average") for key in ours)
    for key in ours:
        assert torch.equal(ours[key], theirs[key]), key


def test_every_checkpoint_after_the_switch_holds_the_averages(through):
    """And the optimiser's state the iterates."""
    epochs = [saved(through, f"checkpoint{epoch}.pt") for epoch in range(1, 9)]
    switch = switched_after(through)
    for epoch, state in enumerate(epochs, 1):
        tensors = state["last_optimizer_state"]["state"]
        assert bool(tensors) is (epoch > switch)
        for values in tensors.values():
            assert not torch.equal(values["average"], values["iterate"])
            assert any(
                weight.shape == values["average"].shape and torch.equal(weight, values["average"])
                for weight in state["model"].values()
            )
    if torch_release() >= (1, 13):
        torch.load(through / "checkpoint_best.pt", weights_only=True)


def test_fine_tuning_averages_at_once_and_stops(train, through):
    best = through / "checkpoint_best.pt"
    tuned = train(
        *RUN,
        *("--max-epoch", "40", "--nt-asgd-interval", "1", "--nt-asgd-from-start"),
        *("--nt-asgd-stop", "--finetune-from-model", best),
    )
    log = (tuned / "log.txt").read_text()
    ended = re.search(r"NT-ASGD ends training, (\d+) iterates averaged, after epoch (\d+)", log)
    assert ended and int(ended[2]) < 40
    assert "stopping training because current learning rate (0.0)" in log
    state = saved(tuned, "checkpoint_last.pt")
    updates = state["optimizer_history"][-1]["num_updates"]
    assert int(ended[1]) == updates == state["last_optimizer_state"]["param_groups"][0]["averaged"]
