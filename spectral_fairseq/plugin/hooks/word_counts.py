"""The counts of ``--gradient-gating`` in checkpoints, so that a training resumes with them."""

from __future__ import annotations

from typing import Any

from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.plugin.criterions.penalised import PenalisedCrossEntropy
from spectral_fairseq.plugin.hooks.extra_state import kept_in_checkpoints


def _state_of(trainer: Any) -> Any:
    criterion = trainer.get_criterion()
    counts = isinstance(criterion, PenalisedCrossEntropy) and len(criterion.word_memory) > 0
    return criterion.word_memory.state_dict() if counts else None


def _restore(trainer: Any, state: Any) -> None:
    criterion = trainer.get_criterion()
    if state is not None and isinstance(criterion, PenalisedCrossEntropy):
        criterion.word_memory.load_state_dict(state)


PATCH = Patch(
    name="counts of gradient gating",
    reason="--gradient-gating resumes with the words that it has counted.",
    install=replaces(kept_in_checkpoints("gradient_gating", _state_of, _restore)),
)
