"""The methods in any training with torch: on models that exist, in a few lines."""

import importlib.util
from typing import TYPE_CHECKING, Any

from spectral_fairseq.provenance import skip_broken_torchaudio

if TYPE_CHECKING:
    from spectral_fairseq.functional.float32_products import float32_products
    from spectral_fairseq.lm.muon import Muon
    from spectral_fairseq.training.control import SpectrumControl
    from spectral_fairseq.training.groups import hidden_matrices, parameter_groups
    from spectral_fairseq.training.losses import TokenLoss, fused_loss_, mixture_, plain_
    from spectral_fairseq.training.penalties import TablePenalty
    from spectral_fairseq.training.repair import repair_
    from spectral_fairseq.training.saving import plain_state_dict, restore_
    from spectral_fairseq.training.tables import factor_, weight_norm_

__all__ = [
    "Muon",
    "SpectrumControl",
    "TablePenalty",
    "TokenLoss",
    "factor_",
    "float32_products",
    "fused_loss_",
    "hidden_matrices",
    "mixture_",
    "parameter_groups",
    "plain_",
    "plain_state_dict",
    "repair_",
    "restore_",
    "weight_norm_",
]

_PARTS = (
    *(
        f"training.{part}"
        for part in ("control", "losses", "penalties", "tables", "repair", "groups", "saving")
    ),
    "functional.float32_products",
    "lm.muon",
)


def __getattr__(name: str) -> Any:
    # Imported when they are used.
    if name in __all__:
        # transformers is imported next, and would fail beside a torchaudio of another build.
        if importlib.util.find_spec("transformers") is not None:
            skip_broken_torchaudio()
        for part in _PARTS:
            module = importlib.import_module(f"spectral_fairseq.{part}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
