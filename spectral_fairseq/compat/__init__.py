"""Patches of defects of fairseq under the installed torch and numpy: one dataclass a patch.

Note [When fairseq is patched]
------------------------------
fairseq imports the folder given by ``--user-dir`` while it builds its argument parser, that is
before arguments are read, data is loaded or a checkpoint is opened, and again at the top of
every spawned worker. So functions may be replaced as module attributes: no caller has run yet,
and fairseq's own callers look these functions up by attribute at the time of the call.
"""

from __future__ import annotations

from typing import List

from spectral_fairseq.compat import checkpoints, data, machines, resuming
from spectral_fairseq.compat.patching import Applied, Status, apply_all, why_not_importable

__all__ = ["PATCHES", "Applied", "Status", "patch_fairseq", "why_not_importable"]

PATCHES = (
    data.TAIL_BATCH,
    checkpoints.SAFE_LOADING,
    checkpoints.LITERAL_SETTINGS,
    data.FASTA_INDEX,
    checkpoints.DAMAGED_CHECKPOINT,
    machines.NUMPY_NAMES,
    machines.SPAN_MASKS,
    machines.PREFETCH_THREAD,
    checkpoints.DEAD_ENCODER_KEYS,
    machines.ENCODER_FAST_PATH,
    machines.BASE_LAYERS,
    checkpoints.ATOMIC_COPY,
    data.DAMAGED_DATA,
    data.SEVERAL_PARTS,
    data.NOTHING_LEFT,
    resuming.PATIENCE,
    resuming.DATA_POSITION,
    resuming.BATCH_COMPOSITION,
    resuming.CURRICULUM,
    resuming.SEVERAL_TRAININGS,
    resuming.FLOAT32_WEIGHTS,
    resuming.VALIDATION_ON_TRAIN,
    machines.CPU_WORKERS,
    machines.JOBLIB_WORKERS,
    machines.VALIDATION_TASK,
    machines.MBART_TASK,
    machines.BF16_WITHOUT_TPU,
    machines.BF16_EVALUATION,
    checkpoints.EMBEDDING_FILE,
    checkpoints.KEPT_LAYERS,
)


def patch_fairseq() -> List[Applied]:
    """Apply every patch that the installed fairseq needs; later calls only report.

    Returns:
        One entry for each of :data:`PATCHES`, in their order.
    """
    return apply_all(PATCHES)
