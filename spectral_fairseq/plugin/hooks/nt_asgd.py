"""``nt_asgd`` decides when the trainer's model holds the averaged weights, and checks its flags.

Note [When the model holds the averages]
----------------------------------------
fairseq validates, then saves what it validated, then tells the schedule. So the averages go into
the model where validation begins, and leave it where the next update begins, not where validation
ends: ``checkpoint_best.pt`` is what was measured. They also go in before a checkpoint is written
without validation. Hence one rule: from the first averaged update on, the ``model`` of every
checkpoint is the average, which every tool loads as it is, and the optimiser's state in the same
file holds the weights that training goes on from.

Workers hold equal weights and take equal steps, so each averages alike, with no communication.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.plugin.optim.nt_asgd import show_averages, show_iterates

NAME = "nt_asgd"


def _name(node: Any) -> Any:
    return getattr(node, "_name", None)


def _trains_with_nt_asgd(trainer: Any) -> bool:
    return _name(trainer.cfg.optimizer) == NAME


def check_configuration(cfg: Any) -> None:
    """Refuse flags that cannot work, before training starts; let the learning rate 0 end it.

    Args:
        cfg: fairseq's whole configuration; ``optimization.stop_min_lr`` may be changed.

    Raises:
        ConfigurationError: flags that exclude each other.
        UnsupportedError: a feature of fairseq that changes weights outside the optimizer, or
            hides them from it.
    """
    optimizer, schedule = _name(cfg.optimizer), _name(cfg.lr_scheduler)
    if optimizer != NAME and schedule != NAME:
        return
    if optimizer != schedule:
        raise ConfigurationError(
            "--optimizer nt_asgd with --lr-scheduler nt_asgd",
            f"--optimizer {optimizer} with --lr-scheduler {schedule}",
            "Give both flags, or neither.",
        )
    stop = cfg.lr_scheduler.nt_asgd_stop
    if cfg.dataset.disable_validation and (stop or not cfg.optimizer.nt_asgd_from_start):
        raise ConfigurationError(
            "a validation loss, which decides when nt_asgd averages or stops",
            "--disable-validation",
            "Remove it; or average at once and never stop, by --nt-asgd-from-start without "
            "--nt-asgd-stop.",
        )
    if cfg.checkpoint.maximize_best_checkpoint_metric:
        raise ConfigurationError(
            "a validation measure that improves downwards",
            f"--maximize-best-checkpoint-metric with {cfg.checkpoint.best_checkpoint_metric}",
            "Remove it, and --best-checkpoint-metric too unless that is a loss.",
        )
    for asked, flag in (
        (cfg.optimization.use_bmuf, "--use-bmuf"),
        (
            cfg.distributed_training.ddp_backend in ("fully_sharded", "slowmo"),
            f"--ddp-backend {cfg.distributed_training.ddp_backend}",
        ),
        (cfg.distributed_training.zero_sharding != "none", "--zero-sharding"),
        (cfg.common.tpu, "--tpu"),
    ):
        if asked:
            raise UnsupportedError(
                "every worker to hold and step all weights, for --optimizer nt_asgd",
                flag,
                "Remove it; --ddp-backend legacy_ddp and pytorch_ddp work.",
            )
    if stop and cfg.optimization.stop_min_lr < 0:
        cfg.optimization.stop_min_lr = 0.0


def _checking(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def init_and_check(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        check_configuration(self.cfg)

    return init_and_check


def _with(show: Callable[[Any], None]) -> Callable[..., Any]:
    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def show_first(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _trains_with_nt_asgd(self):
                show(self.optimizer)
            return method(self, *args, **kwargs)

        return show_first

    return wrap


def _telling_saved_loss(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the schedule the loss that the interrupted run was about to tell it.

    fairseq saves at the end of an epoch, then calls ``lr_step(epoch, loss)``. A run that
    resumes from that file calls ``lr_step`` without a loss; the file has it.
    """

    @functools.wraps(load_checkpoint)
    def load_and_tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        extra_state = load_checkpoint(self, *args, **kwargs)
        if extra_state is not None and _trains_with_nt_asgd(self) and self.lr_scheduler.resumed:
            position = extra_state["train_iterator"]
            # In the middle of an epoch the loss is one that the schedule is never told.
            if position["iterations_in_epoch"] == 0 and extra_state["val_loss"] is not None:
                self.lr_step(position["epoch"] - 1, extra_state["val_loss"])
        return extra_state

    return load_and_tell


PATCH = Patch(
    name="nt_asgd in the trainer",
    reason="--optimizer nt_asgd validates and saves the averaged weights, goes on training the "
    "others, and refuses flags that it cannot work with.",
    install=replaces(
        {
            "fairseq.trainer:Trainer.__init__": _checking,
            "fairseq.trainer:Trainer.begin_valid_epoch": _with(show_averages),
            "fairseq.trainer:Trainer.save_checkpoint": _with(show_averages),
            # The first step of every update, also of one that is repeated after a failure.
            "fairseq.trainer:Trainer.zero_grad": _with(show_iterates),
            "fairseq.trainer:Trainer.load_checkpoint": _telling_saved_loss,
        }
    ),
)
