"""The names of ``--criterion``: each is the same criterion with other default flags."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple

from fairseq.criterions import register_criterion

from spectral_fairseq.plugin.criterions import unset
from spectral_fairseq.plugin.criterions.penalised import (
    PenalisedCriterionConfig,
    PenalisedCrossEntropy,
)
from spectral_fairseq.plugin.models.options import with_defaults


class Preset(NamedTuple):
    """A registered criterion.

    Args:
        name: what users give as ``--criterion``.
        class_name: checkpoints hold it, and fairseq resumes only with the same one.
        defaults: of the flags that differ from :data:`PenalisedCriterionConfig`.
        doc: docstring of the class.
    """

    name: str
    class_name: str
    defaults: Dict[str, Any]
    doc: str


PRESETS = (
    Preset(
        "mle_cosreg",
        "MLECosReg",
        {"cosreg_weight": 1.0},
        "Cross entropy and the mean cosine between different words.\n\n"
        "Gao et al., ICLR 2019, https://arxiv.org/abs/1907.12009, with the paper's gamma = 1.",
    ),
    Preset(
        "spectrum_control",
        "SpectrumControl",
        {name: None for name in unset.NAMES},
        "Cross entropy with the spectrum and orthogonality penalties of an SVD table, or the "
        "decoupled control of any other.\n\n"
        "Wang et al., ICLR 2020, https://openreview.net/forum?id=ByxY8CNtvr; see unset.py.",
    ),
    Preset(
        "weight_norm",
        "WeightNorm",
        {"weight_norm_weight": 1e-3, "weight_norm_target": 2.0},
        "Cross entropy and the distance of the word vectors' norms from nu.\n\n"
        "Herold et al., WMT 2018, https://aclanthology.org/W18-6310, with the paper's rho = 1e-3 "
        "and nu = 2.",
    ),
)

for _preset in PRESETS:
    _config = with_defaults(
        PenalisedCriterionConfig, f"{_preset.class_name}Config", **_preset.defaults
    )
    _members = {"__doc__": _preset.doc, "__module__": __name__}
    register_criterion(_preset.name, dataclass=_config)(
        type(_preset.class_name, (PenalisedCrossEntropy,), _members)
    )
