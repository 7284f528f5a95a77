"""Spectral normalisation as a penalty: a comparator of Wang et al., ICLR 2020, appendix B.

https://openreview.net/forum?id=ByxY8CNtvr, after Jiang et al., ICLR 2019,
https://openreview.net/forum?id=rJNH6sAqY7
"""

from spectral_fairseq.functional.spectrum_penalties import spectral_normalization_penalty
from spectral_fairseq.plugin.criterions.penalties.needs import singular_values
from spectral_fairseq.plugin.criterions.penalties.penalty import Penalty
from spectral_fairseq.plugin.flags import weight_flag

SPECTRAL_NORMALIZATION = Penalty(
    name="spectral_normalization",
    weight=weight_flag("spectral_normalization_weight", "weight of sum_k (1 - sigma_k/sigma_1)^2"),
    needs=singular_values,
    value=lambda sigma, _: spectral_normalization_penalty(sigma),
)
