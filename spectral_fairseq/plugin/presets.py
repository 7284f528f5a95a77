"""The names of ``--criterion``: each is the same criterion with other default flags."""

from __future__ import annotations

from typing import Any, Callable, List

from fairseq.criterions import register_criterion

from spectral_fairseq.plugin.criterion import PenalisedCriterionConfig, PenalisedCrossEntropy
from spectral_fairseq.plugin.registry import with_defaults
from spectral_fairseq.plugin.spectrum_control import NAMES

PRESETS: List[str] = []


def _preset(name: str, **defaults: Any) -> Callable[[Any], Any]:
    """Register a class as ``--criterion name``, with other defaults of some flags.

    Checkpoints hold the name of the class, and fairseq resumes only with the same one.
    """

    def register(kind: Any) -> Any:
        PRESETS.append(name)
        config = with_defaults(PenalisedCriterionConfig, f"{kind.__name__}Config", **defaults)
        return register_criterion(name, dataclass=config)(kind)

    return register


@_preset("regularized_cross_entropy")
class RegularizedCrossEntropy(PenalisedCrossEntropy):
    """Cross entropy with the penalties whose flags are given, and without them none.

    It is then fairseq's ``label_smoothed_cross_entropy``.
    """


@_preset("mle_cosreg", cosreg_weight=1.0)
class MLECosReg(PenalisedCrossEntropy):
    """Cross entropy and the mean cosine between different words.

    Gao et al., ICLR 2019, https://arxiv.org/abs/1907.12009, with the paper's gamma = 1.
    """


@_preset("spectrum_control", **dict.fromkeys(NAMES))
class SpectrumControl(PenalisedCrossEntropy):
    """Cross entropy with the penalties of an SVD table, or the decoupled control of any other.

    Wang et al., ICLR 2020, https://openreview.net/forum?id=ByxY8CNtvr; see spectrum_control.py.
    """


@_preset("weight_norm", weight_norm_weight=1e-3, weight_norm_target=2.0)
class WeightNorm(PenalisedCrossEntropy):
    """Cross entropy and the distance of the word vectors' norms from nu.

    Herold et al., WMT 2018, https://aclanthology.org/W18-6310, with the paper's rho = 1e-3 and
    nu = 2.
    """
