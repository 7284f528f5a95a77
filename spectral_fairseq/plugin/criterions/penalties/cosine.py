"""The mean cosine between different words: Gao et al., ICLR 2019, section 5 (MLE-CosReg).

https://openreview.net/forum?id=SkEYojRqtm
"""

from spectral_fairseq.functional.row_penalties import cosine_penalty
from spectral_fairseq.plugin.criterions.penalties.needs import output_table
from spectral_fairseq.plugin.criterions.penalties.penalty import Penalty
from spectral_fairseq.plugin.flags import weight_flag

COSINE = Penalty(
    name="cosine",
    weight=weight_flag("cosreg_weight", "gamma: weight of the mean cosine between different words"),
    needs=output_table,
    value=lambda table, _: cosine_penalty(table.weight, table.excluded),
)
