"""Patches that the plugin's features need: what fairseq's trainer has no hook for."""

from __future__ import annotations

from typing import List

from spectral_fairseq.compat.patching import Applied, apply_all
from spectral_fairseq.plugin.optim.coupled_adam import COUPLED_ADAM
from spectral_fairseq.plugin.optim.nt_asgd import NT_ASGD
from spectral_fairseq.plugin.spectrum_control.trainer import TABLE_CONTROL
from spectral_fairseq.plugin.task.iterator import STREAMS
from spectral_fairseq.plugin.trainer.listeners import (
    TABLE_KINDS,
    TRAINING_COUNTS,
    TRAINING_PROGRESS,
    WAYS_OF_TRAINING,
    WORD_COUNTS,
)
from spectral_fairseq.plugin.trainer.state import FACTOR_DECAY

# In this order: the last wrapper of a function is the outermost.
PATCHES = (
    TRAINING_PROGRESS,
    TRAINING_COUNTS,
    TABLE_KINDS,
    TABLE_CONTROL,
    FACTOR_DECAY,
    NT_ASGD,
    STREAMS,
    COUPLED_ADAM,
    WORD_COUNTS,
    WAYS_OF_TRAINING,
)


def patch_for_features() -> List[Applied]:
    """Apply all of them; later calls only report.

    Returns:
        One entry for each of :data:`PATCHES`, in their order.
    """
    return apply_all(PATCHES)
