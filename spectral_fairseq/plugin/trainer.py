"""What fairseq's trainer has no hook for: wrappers that tell the listeners in order.

Features that change something else have patches in files of their own; ``PATCHES`` names them.
"""

from __future__ import annotations

import types
from typing import Any, Callable, Dict, List, Optional

from spectral_fairseq.compat.patching import Applied, Patch, apply_all, replaces, wrapping
from spectral_fairseq.errors import SpectralFairseqError
from spectral_fairseq.plugin.averages import Averages
from spectral_fairseq.plugin.beam_search import SHARED_SENTENCES
from spectral_fairseq.plugin.checks import Checks, WaysOfTraining
from spectral_fairseq.plugin.control_trainer import TableChanges
from spectral_fairseq.plugin.counts import TRAINING_COUNTS
from spectral_fairseq.plugin.criterion import Updates
from spectral_fairseq.plugin.groups import GROUPS
from spectral_fairseq.plugin.listener import Listener
from spectral_fairseq.plugin.muon import MuonMatrices
from spectral_fairseq.plugin.other_tasks import MODELS_OF_TASKS
from spectral_fairseq.plugin.products import CHOSEN_PRODUCTS, ChosenProducts
from spectral_fairseq.plugin.restored_tables import TABLE_KINDS
from spectral_fairseq.plugin.stream_iterator import STREAMS

LISTENERS = (
    WaysOfTraining,  # refuses before anything else looks at the tables
    MuonMatrices,
    TableChanges,  # decides how an SVD table is trained before the criterion is checked
    Checks,
    Updates,
    Averages,
    ChosenProducts,
)

_ATTRIBUTE = "_spectral_fairseq_listeners"  # of fairseq's trainer


class Listeners:
    """The listeners of one training that have something to do, in their order.

    Args:
        trainer: fairseq's.

    Attributes:
        active: all of them.
        at: a method of :class:`Listener` -> those that do something there.
        have_begun: whether they were told that training begins.
        told_of: the number of updates that they were told of last.
    """

    active: List[Listener]
    at: Dict[str, List[Listener]]

    def __init__(self, trainer: Any) -> None:
        self.have_begun = False
        self.told_of: Optional[int] = None
        self._sort([kind(trainer) for kind in LISTENERS])

    def begin_training(self) -> None:
        """Tell them once, after which some may have nothing to do."""
        if not self.have_begun:
            for listener in self.at["begin_training"]:
                listener.begin_training()
            self._sort(self.active)
            self.have_begun = True

    def _sort(self, listeners: List[Listener]) -> None:
        """Keep those that are active, by the points at which they do something."""
        self.active = [listener for listener in listeners if listener.is_active]
        self.at = {
            point: [one for one in self.active if getattr(type(one), point) is not method]
            for point, method in vars(Listener).items()
            if isinstance(method, types.FunctionType) and not point.startswith("_")
        }


def listeners_of(trainer: Any) -> Listeners:
    """The listeners of a trainer, made when they are first asked for."""
    if not hasattr(trainer, _ATTRIBUTE):
        setattr(trainer, _ATTRIBUTE, Listeners(trainer))
    listeners: Listeners = getattr(trainer, _ATTRIBUTE)
    return listeners


@wrapping
def _init(self: Any, *args: Any, original: Callable[..., None], **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    listeners_of(self)


@wrapping
def _begin_epoch(self: Any, epoch: int, *, original: Callable[..., Any]) -> Any:
    listeners = listeners_of(self)
    listeners.begin_training()
    result = original(self, epoch)
    for listener in listeners.at["begin_epoch"]:
        listener.begin_epoch(epoch)
    return result


@wrapping
def _train_step(self: Any, *args: Any, original: Callable[..., Any], **kwargs: Any) -> Any:
    listeners, before = listeners_of(self), self.get_num_updates()
    for listener in listeners.at["before_update"]:
        if (before + 1) % listener.interval == 0:
            listener.before_update()
    # fairseq calls itself again where --amp overflowed; and an update may be left out.
    result = original(self, *args, **kwargs)
    if before < self.get_num_updates() != listeners.told_of:
        listeners.told_of = self.get_num_updates()
        for listener in listeners.at["after_update"]:
            if (before + 1) % listener.interval == 0:
                listener.after_update()
    return result


@wrapping
def _begin_valid_epoch(self: Any, *args: Any, original: Callable[..., Any], **kwargs: Any) -> Any:
    for listener in listeners_of(self).at["begin_validation"]:
        listener.begin_validation()
    return original(self, *args, **kwargs)


@wrapping
def _save_checkpoint(
    self: Any, filename: str, extra_state: Any, *, original: Callable[..., Any]
) -> Any:
    saved = {listener.name: listener.save() for listener in listeners_of(self).at["save"]}
    kept = {name: state for name, state in saved.items() if state}
    return original(self, filename, {**extra_state, **kept})


@wrapping
def _load_checkpoint(
    self: Any,
    filename: str,
    reset_optimizer: bool = False,
    *args: Any,
    original: Callable[..., Any],
    **kwargs: Any,
) -> Any:
    try:
        extra_state = original(self, filename, reset_optimizer, *args, **kwargs)
    except Exception as error:
        # fairseq replaces what the checks of TABLE_KINDS say by a sentence of its own.
        if isinstance(error.__context__, SpectralFairseqError):
            raise error.__context__ from None
        raise
    if extra_state is not None:
        for listener in listeners_of(self).active:
            if not reset_optimizer:
                listener.restore(extra_state.get(listener.name))
            listener.after_loading(extra_state)
    return extra_state


LISTENING = Patch(
    name="points of a training",
    reason="Checks, spectrum control, --optimizer nt_asgd and muon, and weight-norm tables "
    "act at points of a training at which fairseq calls nobody.",
    install=replaces(
        {
            "fairseq.trainer:Trainer.__init__": _init,
            "fairseq.trainer:Trainer.begin_epoch": _begin_epoch,
            "fairseq.trainer:Trainer.train_step": _train_step,
            "fairseq.trainer:Trainer.begin_valid_epoch": _begin_valid_epoch,
            "fairseq.trainer:Trainer.save_checkpoint": _save_checkpoint,
            "fairseq.trainer:Trainer.load_checkpoint": _load_checkpoint,
        }
    ),
)

PATCHES = (
    LISTENING,
    MODELS_OF_TASKS,
    TRAINING_COUNTS,
    TABLE_KINDS,
    GROUPS,
    STREAMS,
    CHOSEN_PRODUCTS,
    SHARED_SENTENCES,
)


def patch_for_features() -> List[Applied]:
    """Apply all of them; later calls only report.

    Returns:
        One entry for each of :data:`PATCHES`, in their order.
    """
    return apply_all(PATCHES)
