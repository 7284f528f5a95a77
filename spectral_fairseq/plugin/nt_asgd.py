"""Optimiser ``nt_asgd``: SGD that averages its iterates from a point that its schedule finds.

The optimiser is in :mod:`spectral_fairseq.lm.averaged_sgd`, the criterion for that point in
:mod:`spectral_fairseq.lm.non_monotonic`.
"""

# No "from __future__ import annotations" here: fairseq and omegaconf read the field types.
import logging
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II

from spectral_fairseq.errors import ConfigurationError, arguments_as_flags, check_count
from spectral_fairseq.lm.averaged_sgd import AveragedSGD
from spectral_fairseq.lm.non_monotonic import NonMonotonicTrigger
from spectral_fairseq.options import option

logger = logging.getLogger(__name__)


@dataclass
class NTASGDConfig(FairseqDataclass):
    """Flags of the optimiser; the paper trains with --lr 30 --weight-decay 1.2e-6."""

    weight_decay: float = option(0.0, "weight decay (L2)", alias="--wd")
    nt_asgd_from_start: bool = option(
        False,
        "average from the first update on, without waiting for the validation loss "
        "to stop improving: fine-tuning, with --finetune-from-model",
    )
    lr: List[float] = II("optimization.lr")


@register_optimizer("nt_asgd", dataclass=NTASGDConfig)
class NTASGD(FairseqOptimizer):
    """Non-monotonically triggered averaged SGD, to be used with ``--lr-scheduler nt_asgd``."""

    def __init__(self, cfg: NTASGDConfig, params: Any) -> None:
        super().__init__(cfg)
        with arguments_as_flags(lr="--lr", weight_decay="--weight-decay"):
            self._optimizer = AveragedSGD(params, **self.optimizer_config)
        self._start_where_asked()

    def _start_where_asked(self) -> None:
        if self.cfg.nt_asgd_from_start:
            self._optimizer.start_averaging()

    @property
    def optimizer_config(self) -> Dict[str, Any]:
        """Keyword arguments of the torch optimiser."""
        return {"lr": self.cfg.lr[0], "weight_decay": self.cfg.weight_decay}

    def load_state_dict(
        self, state_dict: Dict[str, Any], optimizer_overrides: Optional[Dict[str, Any]] = None
    ) -> None:
        """Continue from a saved state."""
        super().load_state_dict(state_dict, optimizer_overrides)
        self._start_where_asked()


def unpaired(found: str) -> ConfigurationError:
    """The error for one of the two flags of ``nt_asgd`` without the other."""
    wanted = "--optimizer nt_asgd with --lr-scheduler nt_asgd"
    return ConfigurationError(wanted, found, "Give both flags, or neither.")


def averaged_sgd(optimizer: FairseqOptimizer) -> AveragedSGD:
    """The optimiser of torch under fairseq's wrappers for half precision.

    Raises:
        ConfigurationError: the optimiser is not ``--optimizer nt_asgd``.
    """
    inner = optimizer.optimizer
    if not isinstance(inner, AveragedSGD):
        raise unpaired(f"the optimiser {type(inner).__name__}")
    return inner


def show_averages(optimizer: FairseqOptimizer) -> None:
    """Put the averages into the model, which may be a half-precision copy."""
    if averaged_sgd(optimizer).use_averages():
        _update_copy(optimizer)


def show_iterates(optimizer: FairseqOptimizer) -> None:
    """Put the weights that are trained into the model."""
    if averaged_sgd(optimizer).use_iterates():
        _update_copy(optimizer)


def _update_copy(optimizer: FairseqOptimizer) -> None:
    # FP16Optimizer trains a float32 copy of the parameters, which the model does not see.
    if hasattr(optimizer, "_sync_fp32_params_to_fp16"):
        optimizer._sync_fp32_params_to_fp16()


@dataclass
class NTASGDScheduleConfig(FairseqDataclass):
    """Flags of the schedule, with the paper's interval."""

    nt_asgd_interval: int = option(
        5,
        "start to average when the validation loss exceeds the lowest one from more "
        "than this number of epochs ago",
    )
    nt_asgd_stop: bool = option(
        False,
        "once averaging, end training when the averages' validation loss exceeds "
        "the lowest one from more than --nt-asgd-interval epochs ago",
    )
    warmup_updates: int = option(0, "warm up the learning rate linearly for the first N updates")
    lr: List[float] = II("optimization.lr")


@register_lr_scheduler("nt_asgd", dataclass=NTASGDScheduleConfig)
class NTASGDSchedule(FairseqLRScheduler):
    """Starts averaging when the validation loss stops improving, for ``--optimizer nt_asgd``.

    The non-monotonic criterion is checked once an epoch. When it is met, it is reset and then
    checked on the losses of the averages; with ``--nt-asgd-stop`` training ends when it is met
    again. Training ends by a learning rate of 0, at which fairseq stops (``--stop-min-lr 0``).

    The checkpoint at the end of an epoch is written before that epoch's loss is checked here, and
    holds the loss elsewhere (see ``Averages``). A resumed run therefore checks it again, with the
    flags that it is given.

    Raises:
        ConfigurationError: another optimiser, several learning rates, or a negative interval.
    """

    def __init__(self, cfg: NTASGDScheduleConfig, optimizer: Any) -> None:
        super().__init__(cfg, optimizer)
        averaged_sgd(optimizer)
        what = "learning rate for --lr-scheduler nt_asgd"
        check_count(len(cfg.lr), 1, what, "Give --lr one value.")
        with arguments_as_flags(interval="--nt-asgd-interval"):
            self.trigger = NonMonotonicTrigger(cfg.nt_asgd_interval)
        self.stopped = False
        self.resumed = False  # whether a state was loaded

    def state_dict(self) -> Dict[str, Any]:
        """The losses seen so far, as plain numbers."""
        return {"best": self.best, "history": list(self.trigger.history)}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Continue from a saved state; that of another schedule has no losses to go on with."""
        self.best = state_dict.get("best")
        self.trigger.history = list(state_dict.get("history", ()))
        self.resumed = True

    def step(self, epoch: int, val_loss: Optional[float] = None) -> None:
        """Check the criterion at the end of an epoch, which may not have been validated."""
        if val_loss is None or self.stopped:
            return
        super().step(epoch, float(val_loss))
        reference, interval = self.trigger.reference, self.trigger.interval
        if not self.trigger.check(val_loss):
            return
        inner = averaged_sgd(self.optimizer)
        reason = (
            f"after epoch {epoch}: validation loss {val_loss:g} is above {reference:g}, "
            f"the lowest of more than {interval} epochs ago"
        )
        if not inner.averaging:
            inner.start_averaging()
            self.trigger.restart()
            logger.info(f"NT-ASGD starts to average {reason}")
        elif self.cfg.nt_asgd_stop:
            self.stopped = True
            logger.info(f"NT-ASGD ends training, {inner.averaged} iterates averaged, {reason}")

    def step_update(self, num_updates: int) -> float:
        """Set and return the rate of the next update: less in warm-up, 0 to end training."""
        if self.stopped:
            self.optimizer.set_lr(0.0)
        else:
            warmup = min(1.0, (num_updates + 1) / max(1, self.cfg.warmup_updates))
            self.optimizer.set_lr(self.cfg.lr[0] * warmup)
        return self.optimizer.get_lr()
