"""Patches of fairseq's defects under the installed torch and numpy, one patch a file.

# Note [When fairseq is patched]
fairseq imports the folder given by ``--user-dir`` while it builds its argument parser, that is
before arguments are read, data is loaded or a checkpoint is opened, and again at the top of
every spawned worker. So functions may be replaced as module attributes: no caller has run yet,
and fairseq's own callers look these functions up by attribute at the time of the call.
"""

from __future__ import annotations

from typing import List

from spectral_fairseq.compat import (
    atomic_copy,
    batch_composition,
    bf16_without_tpu,
    cpu_workers,
    curriculum,
    damaged_checkpoint,
    damaged_data,
    data_position,
    dead_encoder_keys,
    embedding_file,
    encoder_fast_path,
    fasta_index,
    joblib_workers,
    kept_layers,
    literal_settings,
    numpy_names,
    patience,
    prefetch_thread,
    safe_loading,
    several_trainings,
    tail_batch,
    validation_on_train,
    validation_task,
)
from spectral_fairseq.compat.patching import Applied, Status, apply_all, why_not_importable

__all__ = ["PATCHES", "Applied", "Status", "patch_fairseq", "why_not_importable"]

PATCHES = (
    tail_batch.PATCH,
    safe_loading.PATCH,
    literal_settings.PATCH,
    fasta_index.PATCH,
    damaged_checkpoint.PATCH,
    numpy_names.PATCH,
    prefetch_thread.PATCH,
    dead_encoder_keys.PATCH,
    encoder_fast_path.PATCH,
    atomic_copy.PATCH,
    damaged_data.PATCH,
    patience.PATCH,
    data_position.PATCH,
    batch_composition.PATCH,
    curriculum.PATCH,
    several_trainings.PATCH,
    validation_on_train.PATCH,
    cpu_workers.PATCH,
    joblib_workers.PATCH,
    validation_task.PATCH,
    bf16_without_tpu.PATCH,
    embedding_file.PATCH,
    kept_layers.PATCH,
)


def patch_fairseq() -> List[Applied]:
    """Apply every patch that the installed fairseq needs; later calls only report.

    Returns:
        One entry for each of :data:`PATCHES`, in their order.
    """
    return apply_all(PATCHES)
