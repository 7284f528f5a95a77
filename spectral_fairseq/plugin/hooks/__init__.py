"""Patches that the plugin's features need: what fairseq has no hook for, one feature a file."""

from __future__ import annotations

from typing import List

from spectral_fairseq.compat.patching import Applied, apply_all
from spectral_fairseq.plugin.hooks import (
    coupled_adam,
    factor_decay,
    nt_asgd,
    streams,
    table_control,
    table_kinds,
    training_counts,
    training_progress,
    ways_of_training,
    word_counts,
)

# In this order: the last wrapper of a function is the outermost.
PATCHES = (
    training_progress.PATCH,
    training_counts.PATCH,
    table_kinds.PATCH,
    table_control.PATCH,
    factor_decay.PATCH,
    nt_asgd.PATCH,
    streams.PATCH,
    coupled_adam.PATCH,
    word_counts.PATCH,
    ways_of_training.PATCH,
)


def patch_for_features() -> List[Applied]:
    """Apply all of them; later calls only report.

    Returns:
        One entry for each of :data:`PATCHES`, in their order.
    """
    return apply_all(PATCHES)
