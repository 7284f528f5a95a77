"""The host made whole: cures for defects of fairseq under the installed torch and numpy.

The only room that asks for a version of torch, numpy or fairseq. One mend a file; each module
has ``NAME``, ``DEFECT`` (one sentence) and ``apply()``, which looks for the defect, by behaviour
where it can, cures it for this process and returns an :class:`~.outcome.Outcome`.

# Note [When the host is mended]
fairseq imports the folder given by ``--user-dir`` while it builds its argument parser, that is
before arguments are read, data is loaded or a checkpoint is opened, and again at the top of
every spawned worker. So functions may be replaced as module attributes: no caller has run yet,
and fairseq's own callers look these functions up by attribute at the time of the call.
"""

from __future__ import annotations

import functools
import importlib
import logging
from dataclasses import dataclass
from types import ModuleType
from typing import List, Optional, Tuple

from spectral_fairseq.compat import (
    atomic_copy,
    bf16_without_tpu,
    damaged_checkpoint,
    dead_encoder_keys,
    fp16_without_cuda,
    missing_data,
    numpy_names,
    prefetch_thread,
    safe_globals,
    tail_batch,
)
from spectral_fairseq.compat.patching import Outcome, Status, cannot

__all__ = ["Mend", "Status", "mend_host", "why_not_importable"]

logger = logging.getLogger(__name__)

_MENDS: Tuple[ModuleType, ...] = (
    tail_batch,
    safe_globals,
    damaged_checkpoint,
    numpy_names,
    prefetch_thread,
    dead_encoder_keys,
    atomic_copy,
    missing_data,
    bf16_without_tpu,
    fp16_without_cuda,
)


@dataclass(frozen=True)
class Mend:
    """One known defect of the host and what became of it in this process.

    Args:
        name: short name, as shown by ``spectral-fairseq doctor``.
        defect: the defect in one sentence.
        status: mended, not needed, or cannot be mended.
        detail: what was changed, or why nothing was.
    """

    name: str
    defect: str
    status: Status
    detail: str


_tried: List[Mend] = []


def mend_host() -> List[Mend]:
    """Apply every mend that the installed host needs; later calls only report.

    Never raises: a mend that fails is reported as one that cannot be made, with the reason, and
    logged as a warning, so that an unknown host still starts.

    Returns:
        One entry for each mend, in a fixed order.
    """
    if not _tried:
        obstacle = why_not_importable()
        if obstacle is not None:
            logger.warning(obstacle)
        for module in _MENDS:
            outcome = _try(module, obstacle)
            if outcome.status is Status.CANNOT and obstacle is None:
                logger.warning("%s: %s (%s)", module.NAME, module.DEFECT, outcome.detail)
            _tried.append(Mend(module.NAME, module.DEFECT, outcome.status, outcome.detail))
    return list(_tried)


@functools.cache  # a second attempt finds fairseq half imported
def why_not_importable() -> Optional[str]:
    """What happens on importing fairseq, or None if nothing does."""
    try:
        importlib.import_module("fairseq")
    except Exception as error:  # stock fairseq fails with a ValueError on Python >= 3.11
        return f"fairseq cannot be imported: {type(error).__name__}: {error}"
    return None


def _try(module: ModuleType, obstacle: Optional[str]) -> Outcome:
    if obstacle is not None:
        return cannot(obstacle)
    try:
        outcome: Outcome = module.apply()
    except Exception as error:  # an unknown host must still start: see mend_host
        return cannot(f"this fairseq is not as expected: {type(error).__name__}: {error}")
    return outcome
