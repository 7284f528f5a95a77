"""``--criterion mle_cosreg``: Gao et al., ICLR 2019, with the paper's gamma = 1."""

from __future__ import annotations

from fairseq.criterions import register_criterion

from spectral_fairseq.plugin.criterions.penalised import (
    PenalisedCriterionConfig,
    PenalisedCrossEntropy,
)
from spectral_fairseq.plugin.models.options import with_defaults

MLECosRegConfig = with_defaults(
    PenalisedCriterionConfig,
    "MLECosRegConfig",
    cosreg_weight=1.0,
)


@register_criterion("mle_cosreg", dataclass=MLECosRegConfig)
class MLECosReg(PenalisedCrossEntropy):
    """Cross entropy and the mean cosine between different words."""
