"""The mean cosine between different words: Gao et al., ICLR 2019, section 5 (MLE-CosReg).

https://openreview.net/forum?id=SkEYojRqtm
"""

from spectral_fairseq.functional.penalties.cosine import cosine_penalty
from spectral_fairseq.plugin.criterions.penalties.needs import output_table
from spectral_fairseq.plugin.criterions.penalties.penalty import Penalty
from spectral_fairseq.plugin.flags import Flag, finite_nonnegative

COSINE = Penalty(
    name="cosine",
    weight=Flag(
        "cosreg_weight",
        0.0,
        "gamma: weight of the mean cosine between different words",
        finite_nonnegative,
    ),
    needs=output_table,
    value=lambda table, _: cosine_penalty(table.weight, table.excluded),
)
