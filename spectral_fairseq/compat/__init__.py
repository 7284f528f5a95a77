"""Patches of defects of fairseq under the installed torch and numpy: one dataclass a patch.

Note [When fairseq is patched]
------------------------------
fairseq's commands with a parser import the folder given by ``--user-dir`` while they build it, that
is before arguments are read, data is loaded or a checkpoint is opened, and again at the top of
every spawned worker. So functions may be replaced as module attributes: no caller has run yet,
and fairseq's own callers look these functions up by attribute at the time of the call.

``fairseq-hydra-train`` and the module ``hydra_validate`` import it at the top of ``main``, when
``infer_init_method`` and ``call_main`` have run. What acts there comes too late: ``cpu_workers.py``
has a refusal and ``plugin/products.py`` a choice for that case, and ``hydra_validate`` evaluates in
float32 whatever ``common.bf16`` says.
"""

from __future__ import annotations

from typing import List

from spectral_fairseq.compat.asynchronous_checkpoint import ASYNCHRONOUS_CHECKPOINT
from spectral_fairseq.compat.atomic_copy import ATOMIC_COPY
from spectral_fairseq.compat.batch_composition import BATCH_COMPOSITION
from spectral_fairseq.compat.bfloat16 import BF16_EVALUATION, BF16_WITHOUT_TPU
from spectral_fairseq.compat.cpu_workers import CPU_WORKERS
from spectral_fairseq.compat.damaged_checkpoint import DAMAGED_CHECKPOINT
from spectral_fairseq.compat.damaged_data import DAMAGED_DATA
from spectral_fairseq.compat.data_in_parts import SEVERAL_PARTS
from spectral_fairseq.compat.data_position import DATA_POSITION
from spectral_fairseq.compat.dead_encoder_keys import DEAD_ENCODER_KEYS
from spectral_fairseq.compat.embedding_file import EMBEDDING_FILE
from spectral_fairseq.compat.encoder_fast_path import ENCODER_FAST_PATH
from spectral_fairseq.compat.float32_weights import FLOAT32_WEIGHTS
from spectral_fairseq.compat.literal_settings import LITERAL_SETTINGS
from spectral_fairseq.compat.mbart import MBART_TASK
from spectral_fairseq.compat.nothing_left import NOTHING_LEFT
from spectral_fairseq.compat.numpy_names import NUMPY_NAMES
from spectral_fairseq.compat.patching import Applied, Status, apply_all, why_not_importable
from spectral_fairseq.compat.patience import PATIENCE
from spectral_fairseq.compat.prefetch_thread import PREFETCH_THREAD
from spectral_fairseq.compat.safe_loading import SAFE_LOADING
from spectral_fairseq.compat.several_trainings import SEVERAL_TRAININGS
from spectral_fairseq.compat.tail_batch import TAIL_BATCH

__all__ = ["PATCHES", "Applied", "Status", "patch_fairseq", "why_not_importable"]

PATCHES = (
    SAFE_LOADING,
    LITERAL_SETTINGS,
    DEAD_ENCODER_KEYS,
    ATOMIC_COPY,
    ASYNCHRONOUS_CHECKPOINT,
    DAMAGED_CHECKPOINT,
    EMBEDDING_FILE,
    TAIL_BATCH,
    DAMAGED_DATA,
    SEVERAL_PARTS,
    NOTHING_LEFT,
    PATIENCE,
    DATA_POSITION,
    BATCH_COMPOSITION,
    SEVERAL_TRAININGS,
    FLOAT32_WEIGHTS,
    NUMPY_NAMES,
    PREFETCH_THREAD,
    ENCODER_FAST_PATH,
    CPU_WORKERS,
    BF16_WITHOUT_TPU,
    BF16_EVALUATION,
    MBART_TASK,
)


def patch_fairseq() -> List[Applied]:
    """Apply every patch that the installed fairseq needs; later calls only report.

    Returns:
        One entry for each of :data:`PATCHES`, in their order.
    """
    return apply_all(PATCHES)
