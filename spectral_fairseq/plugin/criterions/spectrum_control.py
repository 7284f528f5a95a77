"""``--criterion spectrum_control``: Wang et al., ICLR 2020."""

from __future__ import annotations

from fairseq.criterions import register_criterion

from spectral_fairseq.plugin.criterions.penalised import (
    PenalisedCriterionConfig,
    PenalisedCrossEntropy,
)
from spectral_fairseq.plugin.models.options import with_defaults

# The paper gives grids and no values; these are the ones docs/spectrum.md arrives at.
SpectrumControlConfig = with_defaults(
    PenalisedCriterionConfig,
    "SpectrumControlConfig",
    spectrum_weight=0.0001,
    orthogonality_weights="0.001,0.001,0,0",
)


@register_criterion("spectrum_control", dataclass=SpectrumControlConfig)
class SpectrumControl(PenalisedCrossEntropy):
    """Cross entropy with the spectrum and orthogonality penalties of an SVD table."""
