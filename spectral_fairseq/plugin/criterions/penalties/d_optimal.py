"""The D-optimal regulariser: a comparator of Wang et al., ICLR 2020, appendix B.

https://openreview.net/forum?id=ByxY8CNtvr, after Jiang et al., ICLR 2019,
https://openreview.net/forum?id=rJNH6sAqY7
"""

from spectral_fairseq.functional.penalties.d_optimal import d_optimal_penalty
from spectral_fairseq.plugin.criterions.penalties.needs import singular_values
from spectral_fairseq.plugin.criterions.penalties.penalty import Penalty
from spectral_fairseq.plugin.flags import Flag, finite_nonnegative

D_OPTIMAL = Penalty(
    name="d_optimal",
    weight=Flag("d_optimal_weight", 0.0, "weight of -sum_k log sigma_k", finite_nonnegative),
    needs=singular_values,
    value=lambda sigma, _: d_optimal_penalty(sigma),
)
