"""``--criterion weight_norm``: Herold et al., 2018, with the paper's rho = 1e-3 and nu = 2."""

from __future__ import annotations

from fairseq.criterions import register_criterion

from spectral_fairseq.plugin.criterions.penalised import (
    PenalisedCriterionConfig,
    PenalisedCrossEntropy,
)
from spectral_fairseq.plugin.models.options import with_defaults

WeightNormConfig = with_defaults(
    PenalisedCriterionConfig,
    "WeightNormConfig",
    weight_norm_weight=1e-3,
    weight_norm_target=2.0,
)


@register_criterion("weight_norm", dataclass=WeightNormConfig)
class WeightNorm(PenalisedCrossEntropy):
    """Cross entropy and the distance of the word vectors' norms from nu."""
