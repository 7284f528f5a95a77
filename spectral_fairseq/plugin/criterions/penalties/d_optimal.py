"""The D-optimal regulariser: a comparator of Wang et al., ICLR 2020, appendix B.

https://openreview.net/forum?id=ByxY8CNtvr, after Jiang et al., ICLR 2019,
https://openreview.net/forum?id=rJNH6sAqY7
"""

from spectral_fairseq.functional.spectrum_penalties import (
    d_optimal_penalty,
    normalized_d_optimal_penalty,
)
from spectral_fairseq.plugin.criterions.penalties.needs import singular_values
from spectral_fairseq.plugin.criterions.penalties.penalty import Penalty
from spectral_fairseq.plugin.flags import weight_flag

D_OPTIMAL = Penalty(
    name="d_optimal",
    weight=weight_flag("d_optimal_weight", "weight of -sum_k log sigma_k, which has no minimum"),
    needs=singular_values,
    value=lambda sigma, _: d_optimal_penalty(sigma),
)

NORMALIZED_D_OPTIMAL = Penalty(
    name="normalized_d_optimal",
    weight=weight_flag("normalized_d_optimal_weight", "weight of -sum_k log(sigma_k/sigma_1)"),
    needs=singular_values,
    value=lambda sigma, _: normalized_d_optimal_penalty(sigma),
)
