"""Functions of tensors: torch only, no state, no fairseq, one idea in each file."""

from spectral_fairseq.functional import linalg, losses, measures, penalties
from spectral_fairseq.functional.continuous_cache import cache_probability, interpolate
from spectral_fairseq.functional.counts import smoothed_log_counts
from spectral_fairseq.functional.dynamic_update import DynamicRates, dynamic_update_
from spectral_fairseq.functional.linalg import *  # noqa: F403
from spectral_fairseq.functional.locked_dropout import locked_dropout
from spectral_fairseq.functional.losses import *  # noqa: F403
from spectral_fairseq.functional.measures import *  # noqa: F403
from spectral_fairseq.functional.penalties import *  # noqa: F403
from spectral_fairseq.functional.spectrum_decay import (
    TableChange,
    apply_change_,
    plan_change,
    spectrum_target,
)
from spectral_fairseq.functional.word_dropout import word_dropout

__all__ = [
    "DynamicRates",
    "TableChange",
    "apply_change_",
    "cache_probability",
    "dynamic_update_",
    "interpolate",
    "locked_dropout",
    "plan_change",
    "smoothed_log_counts",
    "spectrum_target",
    "word_dropout",
]
__all__ += linalg.__all__
__all__ += losses.__all__
__all__ += measures.__all__
__all__ += penalties.__all__
