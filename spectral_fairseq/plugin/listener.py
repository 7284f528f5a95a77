"""What a feature does at the points of a training for which fairseq's trainer has no hook.

:mod:`spectral_fairseq.plugin.trainer` has the list of all listeners, and calls them.
"""

from __future__ import annotations

from typing import Any, Dict


class Listener:
    """The part of a feature in one training; by default it does nothing at any point.

    Args:
        trainer: fairseq's, just made; no checkpoint has been loaded.

    Attributes:
        name: key under which :meth:`save`'s values are kept in the extra state of checkpoints.
            fairseq saves the state of a criterion only if it has parameters, and saves that of a
            task without ever loading it again.
        interval: k, if it is told of every k-th update alone.
    """

    name = ""
    interval = 1

    @property
    def is_active(self) -> bool:
        """Whether it has anything to do; asked when it is made, and when training has begun."""
        return True

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def begin_training(self) -> None:
        """Called before the first epoch, after a checkpoint was loaded; the place for refusals.

        In the first step fairseq would dump its state into crash.pt.
        """

    def begin_epoch(self, epoch: int) -> None:
        """Called when an epoch begins, after fairseq's own parts were told."""

    def before_update(self) -> None:
        """Called before each attempt at an update; with --amp one that overflowed is repeated."""

    def after_update(self) -> None:
        """Called after each update that was made."""

    def begin_validation(self) -> None:
        """Called before the model is evaluated."""

    def save(self) -> Any:
        """Called before a checkpoint is written; what it returns is saved unless it is empty."""

    def restore(self, saved: Any) -> None:
        """Called after a checkpoint was loaded, unless training begins anew (--reset-optimizer).

        Args:
            saved: what :meth:`save` returned; ``None`` if the checkpoint lacks it.
        """

    def after_loading(self, extra_state: Dict[str, Any]) -> None:
        """Called after any checkpoint was loaded."""
