"""Schedule ``nt_asgd``: a constant learning rate, and the start of averaging."""

# No "from __future__ import annotations" here: fairseq and omegaconf read the field types.
import logging
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II

from spectral_fairseq.errors import ConfigurationError, arguments_as_flags
from spectral_fairseq.lm.averaged_sgd import NonMonotonicTrigger
from spectral_fairseq.plugin.optim.nt_asgd import averaged_sgd

logger = logging.getLogger(__name__)


@dataclass
class NTASGDScheduleConfig(FairseqDataclass):
    """Flags of the schedule, with the paper's interval."""

    nt_asgd_interval: int = field(
        default=5,
        metadata={
            "help": "start to average when the validation loss exceeds the lowest one from more "
            "than this number of epochs ago"
        },
    )
    nt_asgd_stop: bool = field(
        default=False,
        metadata={
            "help": "once averaging, end training when the averages' validation loss exceeds "
            "the lowest one from more than --nt-asgd-interval epochs ago"
        },
    )
    warmup_updates: int = field(
        default=0,
        metadata={"help": "warm up the learning rate linearly for the first N updates"},
    )
    lr: List[float] = II("optimization.lr")


@register_lr_scheduler("nt_asgd", dataclass=NTASGDScheduleConfig)
class NTASGDSchedule(FairseqLRScheduler):
    """Starts averaging when the validation loss stops improving, for ``--optimizer nt_asgd``.

    The non-monotonic criterion is checked once an epoch. When it is met, it is reset and then
    checked on the losses of the averages; with ``--nt-asgd-stop`` training ends when it is met
    again. Training ends by a learning rate of 0, at which fairseq stops (``--stop-min-lr 0``).

    The checkpoint at the end of an epoch is written before that epoch's loss is checked here, and
    holds the loss elsewhere (hooks/nt_asgd.py). A resumed run therefore checks it again, with the
    flags that it is given.

    Args:
        cfg: the flags.
        optimizer: the trainer's.

    Raises:
        ConfigurationError: another optimiser, several learning rates, or a negative interval.
    """

    def __init__(self, cfg: NTASGDScheduleConfig, optimizer: Any) -> None:
        super().__init__(cfg, optimizer)
        averaged_sgd(optimizer)
        if len(cfg.lr) != 1:
            raise ConfigurationError(
                "one learning rate for --lr-scheduler nt_asgd",
                f"{len(cfg.lr)}: {list(cfg.lr)}",
                "Give --lr one value.",
            )
        with arguments_as_flags(interval="--nt-asgd-interval"):
            self.trigger = NonMonotonicTrigger(cfg.nt_asgd_interval)
        self.stopped = False
        self.resumed = False  # whether a state was loaded

    def state_dict(self) -> Dict[str, Any]:
        """The losses seen so far, as plain numbers."""
        return {"best": self.best, "history": list(self.trigger.history)}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: from :meth:`state_dict`. The state of another schedule has no history, so
                the checks start over.
        """
        self.best = state_dict.get("best")
        self.trigger.history = list(state_dict.get("history", ()))
        self.resumed = True

    def step(self, epoch: int, val_loss: Optional[float] = None) -> None:
        """Check the criterion at the end of an epoch.

        Args:
            epoch: its number.
            val_loss: on the first validation set; None if the epoch was not validated.
        """
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
        """Set the learning rate of the next update.

        Args:
            num_updates: updates taken.

        Returns:
            The learning rate: ``--lr``, less during warm-up, 0 to end training.
        """
        if self.stopped:
            self.optimizer.set_lr(0.0)
        else:
            warmup = min(1.0, (num_updates + 1) / max(1, self.cfg.warmup_updates))
            self.optimizer.set_lr(self.cfg.lr[0] * warmup)
        return self.optimizer.get_lr()
