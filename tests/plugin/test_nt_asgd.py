"""NT-ASGD under fairseq's own trainer: the optimiser, its schedule, and when averages are shown."""

import functools
import logging
import re

import pytest
import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint, torch_load
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.plugin.nt_asgd import NTASGD, averaged_sgd, show_averages, show_iterates
from spectral_fairseq.provenance import torch_release
from tests.capabilities import WEIGHTS_ONLY
from tests.plugin.trainers import (
    ALL_PRECISIONS,
    NT_ASGD,
    PRECISIONS,
    build_trainer,
    flattened_fp16,
    same_states,
    save_in_epoch,
    take_updates,
)

AT_ONCE = "optimizer.nt_asgd_from_start=true"
INTERVAL_0 = "lr_scheduler.nt_asgd_interval=0"
NO_VALIDATION = "dataset.disable_validation=true"
build = functools.partial(build_trainer, optimizer="averaged sgd")


def weights(trainer):
    return {key: one.detach().clone() for key, one in trainer.get_model().state_dict().items()}


def same(first, second):
    """Whether both are the same in the precision of the first."""
    return same_states(first, {key: one.to(first[key].dtype) for key, one in second.items()})


def saved(trainer, path, done=0, **more):
    save_in_epoch(trainer, path, done, **more)
    return torch_load(path, map_location="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ALL_PRECISIONS)
def test_what_is_validated_is_saved_and_what_was_trained_trains_on(precision, tmp_path):
    overrides, kept, seen = (AT_ONCE, *PRECISIONS[precision]), [], []
    trainer, through = build(*overrides), build(*overrides)
    name, _ = next(trainer.get_model().named_parameters())
    for _ in range(4):
        take_updates(trainer, 1)
        first, *_ = trainer.optimizer.optimizer._parameters()
        kept.append(first.detach().double().clone())
    trained = weights(trainer)
    trainer.task.begin_valid_epoch = lambda *_: seen.append(weights(trainer))
    trainer.begin_valid_epoch(1)
    average = weights(trainer)
    assert same(average, seen[0]) and not same(average, trained)
    mean = (sum(kept) / len(kept)).to(average[name].dtype)
    torch.testing.assert_close(average[name], mean)

    path = tmp_path / "checkpoint.pt"
    assert same(average, saved(trainer, path, val_loss=1.0)["model"])  # which is not rounded
    resumed = build(*overrides, begin=False)
    resumed.load_checkpoint(str(path))
    assert same(weights(resumed), average)
    resumed.begin_epoch(1)
    take_updates(through, 6)
    for other in (trainer, resumed):
        take_updates(other, 2)
        assert same(weights(through), weights(other))
    for each in (through, trainer, resumed):
        show_averages(each.optimizer)
        assert same(weights(through), weights(each))


def test_saved_without_validation_the_model_is_the_average_too(tmp_path):
    trainer = build(AT_ONCE)
    take_updates(trainer, 3)
    trained = weights(trainer)
    state = saved(trainer, tmp_path / "checkpoint.pt")
    show_averages(trainer.optimizer)
    assert same(state["model"], weights(trainer)) and not same(state["model"], trained)
    show_iterates(trainer.optimizer)
    assert same(weights(trainer), trained)


def test_before_the_switch_the_model_is_what_was_trained(tmp_path):
    trainer = build()
    take_updates(trainer, 3)
    trained = weights(trainer)
    trainer.begin_valid_epoch(1)
    assert same(saved(trainer, tmp_path / "checkpoint.pt", val_loss=1.0)["model"], trained)


@WEIGHTS_ONLY
def test_the_checkpoint_loads_with_weights_only(tmp_path):
    trainer = build(AT_ONCE)
    take_updates(trainer, 2)
    trainer.lr_step(1, torch.tensor(2.5))
    saved(trainer, tmp_path / "checkpoint.pt", val_loss=2.5)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["optimizer_history"][-1]["lr_scheduler_state"]["history"] == [2.5]


def test_flattened_float32_copy_under_fp16():
    optimizer, params, flat = flattened_fp16(NTASGD, "averaged sgd", AT_ONCE)
    assert optimizer.fp32_optimizer.supports_flat_params
    kept = []
    for step in range(3):
        optimizer.zero_grad()
        optimizer.backward(((params[1] - step) ** 2).sum())
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        kept.append(flat.detach().double().clone())
    trained = params[1].detach().clone()
    show_averages(optimizer)
    mean = (sum(kept) / 3).half()[3:83].view(20, 4)
    torch.testing.assert_close(params[1].detach(), mean)
    assert not torch.equal(params[1], trained)
    show_iterates(optimizer)
    assert torch.equal(params[1], trained) and torch.equal(flat.double(), kept[-1])

    optimizer.zero_grad()
    optimizer.backward((params[1] * float("inf")).sum())
    with pytest.raises(OverflowError):
        optimizer.clip_grad_norm(1.0)
    assert averaged_sgd(optimizer).averaged == 3


@pytest.mark.parametrize(
    "losses, at", [((3, 2, 4), 3), ((3, 2, 2.5, 2.5), 4), ((5, 4, 3, 2), None)]
)
def test_the_switch(losses, at, caplog):
    """With an interval of 1."""
    trainer = build("lr_scheduler.nt_asgd_interval=1")
    inner = averaged_sgd(trainer.optimizer)
    with caplog.at_level(logging.INFO):
        for epoch, loss in enumerate(losses, 1):
            take_updates(trainer, 1)
            assert not inner.averaging and inner.averaged == 0
            trainer.lr_step(epoch, loss)
    assert inner.averaging is (at is not None)
    assert (f"after epoch {at}: validation loss {losses[-1]:g}" in caplog.text) is (at is not None)
    assert trainer.get_lr() == 0.5
    take_updates(trainer, 2)
    assert inner.averaged == (2 if at else 0)


@pytest.mark.parametrize("stop", [True, False])
def test_the_same_criterion_ends_training_on_the_losses_of_the_averages(stop):
    """The loss that caused the switch and those before it do not count for the end."""
    trainer = build(INTERVAL_0, f"lr_scheduler.nt_asgd_stop={stop}")
    rates = [trainer.lr_step(epoch, loss) for epoch, loss in enumerate((3, 4, 9, 8, 8.5), 1)]
    assert rates == [0.5] * 4 + [0.0 if stop else 0.5]
    # main() compares these two, and again after a resumption.
    assert (trainer.get_lr() <= trainer.cfg.optimization.stop_min_lr) is stop


@pytest.mark.parametrize("place", ["end of an epoch", "middle of an epoch", "reset"])
def test_a_loss_in_the_checkpoint_is_checked_on_resumption(place, tmp_path, caplog):
    """fairseq saves before it tells the schedule the loss, and does not repeat it."""
    trainer = build(INTERVAL_0)
    take_updates(trainer, 1)
    trainer.lr_step(1, 2.0)
    take_updates(trainer, 1)
    trainer.begin_valid_epoch(2)
    path, done = tmp_path / "checkpoint.pt", int(place == "middle of an epoch")
    save_in_epoch(trainer, path, done, epoch=3 - done, val_loss=2.5)
    resumed = build(INTERVAL_0, begin=False)
    with caplog.at_level("INFO"):
        resumed.load_checkpoint(str(path), reset_optimizer=place == "reset")
    said = "starts to average after epoch 2: validation loss 2.5"  # the epoch that has ended
    assert (said in caplog.text) is (place == "end of an epoch")
    resumed.lr_step(3)  # as fairseq does after loading
    history = resumed.lr_scheduler.trigger.history
    assert averaged_sgd(resumed.optimizer).averaging is (place == "end of an epoch")
    assert history == {"middle of an epoch": [2.0]}.get(place, [])
    if place == "end of an epoch":
        trainer.lr_step(2, 2.5)
        for each in (trainer, resumed):
            take_updates(each, 3)
            show_averages(each.optimizer)
        assert averaged_sgd(resumed.optimizer).averaged == 3
        assert same(weights(trainer), weights(resumed))


def test_training_goes_on_from_the_file_that_fairseq_writes_on_an_error(tmp_path):
    """crash.pt knows no place in the data, and no loss."""
    trainer, resumed = build(AT_ONCE), build(AT_ONCE, begin=False)
    take_updates(trainer, 2)
    trainer.consolidate_optimizer()
    trainer.save_checkpoint(str(tmp_path / "crash.pt"), {})
    resumed.load_checkpoint(str(tmp_path / "crash.pt"))
    assert resumed.get_num_updates() == 2
    assert averaged_sgd(resumed.optimizer).averaged == 2


def test_warm_up():
    trainer = build("lr_scheduler.warmup_updates=4")
    rates = []
    for _ in range(5):
        rates.append(trainer.get_lr())
        take_updates(trainer, 1)
    assert rates == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5])


def test_a_rate_set_for_one_step_holds_for_that_step_only():
    """As a task does that scales it by the length of the segment."""
    trainer = build()
    trainer.optimizer.set_lr(0.1)
    take_updates(trainer, 1)
    assert trainer.get_lr() == 0.5


@pytest.mark.parametrize("overrides, message", [
    (["lr_scheduler._name=fixed"], "--lr-scheduler fixed"),
    (["optimizer._name=sgd"], "--optimizer sgd"),
    ([NO_VALIDATION], "--disable-validation"),
    (["lr_scheduler.lr=[3,2]"], "--lr"),
    (["lr_scheduler.nt_asgd_interval=-1"], "--nt-asgd-interval"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_training(overrides, message):
    with pytest.raises(ConfigurationError, match=message):
        build(*overrides).lr_step(1)


def test_no_validation_is_needed_to_average_at_once():
    trainer = build(NO_VALIDATION, AT_ONCE)
    assert trainer.get_lr() == 0.5 and trainer.cfg.optimization.stop_min_lr < 0


def test_other_trainings_are_left_alone(tmp_path):
    trainer = build_trainer(optimizer="sgd")
    take_updates(trainer, 1)
    trained = weights(trainer)
    trainer.begin_valid_epoch(1)
    saved(trainer, tmp_path / "checkpoint.pt", val_loss=1.0)
    trainer.load_checkpoint(str(tmp_path / "checkpoint.pt"))
    assert same(weights(trainer), trained)


def test_averaging_is_asked_for_in_a_resumed_run(tmp_path):
    trainer = build()
    take_updates(trainer, 1)
    saved(trainer, tmp_path / "checkpoint.pt", val_loss=1.0)
    resumed = build(AT_ONCE, begin=False)
    resumed.load_checkpoint(str(tmp_path / "checkpoint.pt"))
    take_updates(resumed, 1)
    assert averaged_sgd(resumed.optimizer).averaged == 1


ARCH = ("transformer_lm_sc", "cross_entropy", "--share-decoder-input-output-embed")
# One epoch is several updates; the rate is so high that the validation loss goes up and down.
# Without --grouped-shuffling fairseq composes new batches when it resumes, and only then.
RUN = (*ARCH, *NT_ASGD, "--weight-decay", "1e-4", "--lr", "2.0", "--clip-norm", "1.0")
RUN += ("--max-update", "1000", "--grouped-shuffling")
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


def last_state(folder):
    """Weights, optimiser's tensors and the schedule's state of the last checkpoint."""
    state = load_checkpoint(folder / "checkpoint_last.pt")
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
    (ours, history), (theirs, expected) = last_state(resumed), last_state(through)
    assert history == expected and ours.keys() == theirs.keys()
    assert any(key.endswith(".average") for key in ours)
    for key in ours:
        assert torch.equal(ours[key], theirs[key]), key


def test_every_checkpoint_after_the_switch_holds_the_averages(through):
    """And the optimiser's state the iterates."""
    epochs = [load_checkpoint(through / f"checkpoint{epoch}.pt") for epoch in range(1, 9)]
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
    state = load_checkpoint(tuned / "checkpoint_last.pt")
    updates = state["optimizer_history"][-1]["num_updates"]
    assert int(ended[1]) == updates == state["last_optimizer_state"]["param_groups"][0]["averaged"]
