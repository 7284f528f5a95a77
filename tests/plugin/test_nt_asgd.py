"""NT-ASGD under fairseq's own trainer: the optimiser, its schedule, and when averages are shown."""

import copy
import logging
import re
from types import SimpleNamespace

import pytest
import torch
from fairseq.models import BaseFairseqModel
from fairseq.optim import FP16Optimizer
from fairseq.trainer import Trainer
from omegaconf import OmegaConf
from torch import nn

from spectral_fairseq.checkpoints.reading import load_checkpoint, torch_load
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.plugin.nt_asgd import NTASGD, averaged_sgd, show_averages, show_iterates
from spectral_fairseq.plugin.trainer import listeners_of
from spectral_fairseq.provenance import torch_release
from tests.capabilities import WEIGHTS_ONLY
from tests.plugin.trainers import NT_ASGD, PRECISIONS, parsed

AT_ONCE = "optimizer.nt_asgd_from_start=true"
INTERVAL_0 = "lr_scheduler.nt_asgd_interval=0"
NO_VALIDATION = "dataset.disable_validation=true"


class Model(BaseFairseqModel):
    """Two parameters, one without a use, and a buffer."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 5, generator=generator))
        self.unused = nn.Parameter(torch.randn(2, generator=generator))
        self.register_buffer("count", torch.zeros(1))


class Task(SimpleNamespace):
    def begin_valid_epoch(self, _, model):
        self.seen = weights(model)

    def state_dict(self):
        return {}


def weights(model):
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def same(first, second):
    return all(torch.equal(first[key], second[key].to(first[key].dtype)) for key in first)


def configuration(*overrides):
    """The flags parsed once, which takes a second; what differs is given as ``group.key=value``."""
    return OmegaConf.merge(parsed(*NT_ASGD), OmegaConf.from_dotlist(list(overrides)))


def build_trainer(*overrides):
    return Trainer(configuration(*overrides), Task(), Model(), nn.Module())


def begin_update(trainer):
    for listener in listeners_of(trainer):
        listener.before_update()
    trainer.zero_grad()


def update(trainer, count=1):
    """Updates as the trainer does them, by gradients that depend on the weights and the time."""
    for _ in range(count):
        begin_update(trainer)
        weight = trainer.model.weight
        direction = torch.arange(15.0).sin().view(3, 5) * (trainer.get_num_updates() + 1)
        trainer.optimizer.backward(((weight - direction.to(weight.dtype)) ** 2).sum() * 0.1)
        trainer.optimizer.multiply_grads(1.0)
        trainer.clip_grad_norm(3.0)
        trainer.optimizer.step()
        trainer.set_num_updates(trainer.get_num_updates() + 1)


def save(trainer, path, val_loss=None, epoch=1, done=0):
    """Write what fairseq writes; ``done`` is 0 at the end of the epoch before ``epoch``."""
    iterator = {"version": 2, "epoch": epoch, "iterations_in_epoch": done, "shuffle": True}
    trainer.consolidate_optimizer()
    trainer.save_checkpoint(str(path), {"train_iterator": iterator, "val_loss": val_loss})
    return torch_load(path, map_location="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_validated_is_saved_and_what_was_trained_trains_on(precision, tmp_path):
    through = build_trainer(AT_ONCE, *PRECISIONS[precision])
    trainer = build_trainer(AT_ONCE, *PRECISIONS[precision])
    kept = []
    for _ in range(4):
        update(trainer)
        parameters = [
            p.detach().double().clone() for p in trainer.optimizer.optimizer._parameters()
        ]
        kept.append(parameters[0])
    trained = weights(trainer.model)
    trainer.begin_valid_epoch(1)
    average = weights(trainer.model)
    assert same(average, trainer.task.seen) and not same(average, trained)
    mean = (sum(kept) / len(kept)).to(average["weight"].dtype)
    torch.testing.assert_close(average["weight"], mean.view(3, 5))

    state = save(trainer, tmp_path / "checkpoint.pt", val_loss=1.0)
    assert same(average, state["model"])  # which is not rounded
    begin_update(trainer)
    assert same(weights(trainer.model), trained)
    update(trainer, 2)

    resumed = build_trainer(AT_ONCE, *PRECISIONS[precision])
    resumed.load_checkpoint(str(tmp_path / "checkpoint.pt"))
    assert same(weights(resumed.model), average)
    update(resumed, 2)
    update(through, 6)
    for other in (trainer, resumed):
        assert same(weights(through.model), weights(other.model))
        show_averages(other.optimizer)
    show_averages(through.optimizer)
    assert same(weights(through.model), weights(trainer.model))
    assert same(weights(through.model), weights(resumed.model))


def test_saved_without_validation_the_model_is_the_average_too(tmp_path):
    trainer = build_trainer(AT_ONCE)
    update(trainer, 3)
    trained = weights(trainer.model)
    state = save(trainer, tmp_path / "checkpoint.pt")
    show_averages(trainer.optimizer)
    assert same(state["model"], weights(trainer.model)) and not same(state["model"], trained)
    show_iterates(trainer.optimizer)
    assert same(weights(trainer.model), trained)


def test_before_the_switch_the_model_is_what_was_trained(tmp_path):
    trainer = build_trainer()
    update(trainer, 3)
    trained = weights(trainer.model)
    trainer.begin_valid_epoch(1)
    assert same(save(trainer, tmp_path / "checkpoint.pt", 1.0)["model"], trained)


@WEIGHTS_ONLY
def test_the_checkpoint_loads_with_weights_only(tmp_path):
    trainer = build_trainer(AT_ONCE)
    update(trainer, 2)
    trainer.lr_step(1, torch.tensor(2.5))
    save(trainer, tmp_path / "checkpoint.pt", val_loss=2.5)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["optimizer_history"][-1]["lr_scheduler_state"]["history"] == [2.5]


def test_flattened_float32_copy_under_fp16():
    """What --fp16 does on a GPU: one tensor holds all parameters."""
    cfg = configuration(AT_ONCE, "common.fp16=true")
    model = Model().half()
    params = list(model.parameters())
    flat = nn.Parameter(torch.cat([p.detach().float().view(-1) for p in params]))
    flat.grad = torch.zeros_like(flat)
    inner = NTASGD(cfg.optimizer, [flat])
    # The key is the device's number, which a CPU does not have.
    optimizer = FP16Optimizer(cfg, params, inner, {None: flat})
    assert inner.supports_flat_params
    kept = []
    for step in range(3):
        optimizer.zero_grad()
        optimizer.backward(((model.weight - step) ** 2).sum())
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        kept.append(flat.detach().double().clone())
    trained = weights(model)
    show_averages(optimizer)
    mean = (sum(kept) / 3).half()[:15].view(3, 5)
    torch.testing.assert_close(model.weight.detach(), mean)
    assert not same(weights(model), trained)
    show_iterates(optimizer)
    assert same(weights(model), trained) and torch.equal(flat.double(), kept[-1])

    optimizer.zero_grad()
    optimizer.backward((model.weight * float("inf")).sum())
    with pytest.raises(OverflowError):
        optimizer.clip_grad_norm(1.0)
    assert averaged_sgd(optimizer).averaged == 3


@pytest.mark.parametrize(
    "losses, at", [((3, 2, 4), 3), ((3, 2, 2.5, 2.5), 4), ((5, 4, 3, 2), None)]
)
def test_the_switch(losses, at, caplog):
    """With an interval of 1."""
    trainer = build_trainer("lr_scheduler.nt_asgd_interval=1")
    inner = averaged_sgd(trainer.optimizer)
    with caplog.at_level(logging.INFO):
        for epoch, loss in enumerate(losses, 1):
            update(trainer)
            assert not inner.averaging and inner.averaged == 0
            trainer.lr_step(epoch, loss)
    assert inner.averaging is (at is not None)
    assert (f"after epoch {at}: validation loss {losses[-1]:g}" in caplog.text) is (at is not None)
    assert trainer.get_lr() == 0.5
    update(trainer, 2)
    assert inner.averaged == (2 if at else 0)


@pytest.mark.parametrize("stop", [True, False])
def test_the_same_criterion_ends_training_on_the_losses_of_the_averages(stop):
    """The loss that caused the switch and those before it do not count for the end."""
    trainer = build_trainer(INTERVAL_0, f"lr_scheduler.nt_asgd_stop={stop}")
    rates = [trainer.lr_step(epoch, loss) for epoch, loss in enumerate((3, 4, 9, 8, 8.5), 1)]
    assert rates == [0.5] * 4 + [0.0 if stop else 0.5]
    # main() compares these two, and again after a resumption.
    assert (trainer.get_lr() <= trainer.cfg.optimization.stop_min_lr) is stop


@pytest.mark.parametrize("place", ["end of an epoch", "middle of an epoch", "reset"])
def test_a_loss_in_the_checkpoint_is_checked_on_resumption(place, tmp_path):
    """fairseq saves before it tells the schedule the loss, and does not repeat it."""
    trainer = build_trainer(INTERVAL_0)
    update(trainer)
    trainer.lr_step(1, 2.0)
    update(trainer)
    trainer.begin_valid_epoch(2)
    path, done = tmp_path / "checkpoint.pt", int(place == "middle of an epoch")
    save(trainer, path, val_loss=2.5, epoch=3 - done, done=done)
    resumed = build_trainer(INTERVAL_0)
    resumed.load_checkpoint(str(path), reset_optimizer=place == "reset")
    resumed.lr_step(3)  # as fairseq does after loading
    history = resumed.lr_scheduler.trigger.history
    assert averaged_sgd(resumed.optimizer).averaging is (place == "end of an epoch")
    assert history == {"middle of an epoch": [2.0]}.get(place, [])
    if place == "end of an epoch":
        trainer.lr_step(2, 2.5)
        for each in (trainer, resumed):
            update(each, 3)
            show_averages(each.optimizer)
        assert averaged_sgd(resumed.optimizer).averaged == 3
        assert same(weights(trainer.model), weights(resumed.model))


def test_warm_up():
    trainer = build_trainer("lr_scheduler.warmup_updates=4")
    rates = []
    for _ in range(5):
        rates.append(trainer.get_lr())
        update(trainer)
    assert rates == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5])


def test_a_rate_set_for_one_step_holds_for_that_step_only():
    """As a task does that scales it by the length of the segment."""
    trainer = build_trainer()
    trainer.optimizer.set_lr(0.1)
    update(trainer)
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
        build_trainer(*overrides).lr_step(1)


def test_no_validation_is_needed_to_average_at_once():
    trainer = build_trainer(NO_VALIDATION, AT_ONCE)
    assert trainer.get_lr() == 0.5 and trainer.cfg.optimization.stop_min_lr < 0


def test_other_trainings_are_left_alone(tmp_path):
    cfg = copy.deepcopy(parsed("--lr", "0.5", "--optimizer", "sgd", "--lr-scheduler", "fixed"))
    trainer = Trainer(cfg, Task(), Model(), nn.Module())
    update(trainer)
    trained = weights(trainer.model)
    trainer.begin_valid_epoch(1)
    save(trainer, tmp_path / "checkpoint.pt", val_loss=1.0)
    trainer.load_checkpoint(str(tmp_path / "checkpoint.pt"))
    assert same(weights(trainer.model), trained)


def test_averaging_is_asked_for_in_a_resumed_run(tmp_path):
    trainer = build_trainer()
    update(trainer)
    save(trainer, tmp_path / "checkpoint.pt", val_loss=1.0)
    resumed = build_trainer(AT_ONCE)
    resumed.load_checkpoint(str(tmp_path / "checkpoint.pt"))
    update(resumed)
    assert averaged_sgd(resumed.optimizer).averaged == 1


# Through the command line: interrupted and resumed equals uninterrupted, bit for bit

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
