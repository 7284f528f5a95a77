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

from typing import Any, Dict

from spectral_fairseq import refusals
from spectral_fairseq.plugin.listener import Listener
from spectral_fairseq.plugin.nt_asgd import show_averages, show_iterates, unpaired

NAME = "nt_asgd"


def _name(node: Any) -> Any:
    return getattr(node, "_name", None)


def check_configuration(cfg: Any) -> None:
    """Refuse flags that cannot work, before training starts; let the learning rate 0 end it.

    For the latter, ``optimization.stop_min_lr`` may be changed.

    Raises:
        ConfigurationError: flags that exclude each other.
        UnsupportedError: a feature of fairseq that changes weights outside the optimizer, or
            hides them from it.
    """
    optimizer, schedule = _name(cfg.optimizer), _name(cfg.lr_scheduler)
    if optimizer != NAME and schedule != NAME:
        return
    if optimizer != schedule:
        raise unpaired(f"--optimizer {optimizer} with --lr-scheduler {schedule}")
    stop = cfg.lr_scheduler.nt_asgd_stop
    if stop or not cfg.optimizer.nt_asgd_from_start:
        refusals.NT_ASGD_VALIDATION.check(cfg)
    refusals.NT_ASGD_DOWNWARDS.check(cfg)
    refusals.NT_ASGD.check(cfg)
    if stop and cfg.optimization.stop_min_lr < 0:
        cfg.optimization.stop_min_lr = 0.0


class Averages(Listener):
    """See Note [When the model holds the averages]."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        check_configuration(trainer.cfg)
        self._is_used = _name(trainer.cfg.optimizer) == NAME

    @property
    def is_active(self) -> bool:
        """Whether ``--optimizer nt_asgd`` is in use."""
        return self._is_used

    def before_update(self) -> None:
        """The model holds the weights that are trained."""
        show_iterates(self.trainer.optimizer)

    def begin_validation(self) -> None:
        """The model holds the averages."""
        show_averages(self.trainer.optimizer)

    def save(self) -> None:
        """The model holds the averages."""
        self.begin_validation()

    def after_loading(self, extra_state: Dict[str, Any]) -> None:
        """Tell the schedule the loss that the interrupted run was about to tell it.

        fairseq saves at the end of an epoch, then calls ``lr_step(epoch, loss)``. A run that
        resumes from that file calls ``lr_step`` without a loss; the file has it.
        """
        if self.trainer.lr_scheduler.resumed:
            position = extra_state["train_iterator"]
            loss = extra_state.get("val_loss")  # fairseq's crash.pt has none
            # In the middle of an epoch the loss is one that the schedule is never told.
            if position["iterations_in_epoch"] == 0 and loss is not None:
                self.trainer.lr_step(position["epoch"] - 1, loss)
