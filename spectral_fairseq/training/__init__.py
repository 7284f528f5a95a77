"""The methods in any training with torch: on models that exist, in a few lines."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spectral_fairseq.training.control import SpectrumControl
    from spectral_fairseq.training.losses import TokenLoss, fused_loss_, mixture_, plain_
    from spectral_fairseq.training.penalties import TablePenalty
    from spectral_fairseq.training.tables import factor_, weight_norm_

__all__ = [
    "SpectrumControl",
    "TablePenalty",
    "TokenLoss",
    "factor_",
    "fused_loss_",
    "mixture_",
    "plain_",
    "weight_norm_",
]


def __getattr__(name: str) -> Any:
    # Imported when they are used: fairseq's plugin needs the rule of the control alone.
    if name in __all__:
        for part in ("control", "losses", "penalties", "tables"):
            module = importlib.import_module(f"{__name__}.{part}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
