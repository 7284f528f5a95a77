"""The methods in any training with torch: on models that exist, in a few lines."""

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
