"""The squared length of the output table's mean vector (mu-loss).

https://arxiv.org/abs/2601.02031. ``--table-centering`` is a decoupled form.
"""

from spectral_fairseq.functional.row_penalties import mean_vector_penalty
from spectral_fairseq.plugin.criterions.penalties.needs import output_table
from spectral_fairseq.plugin.criterions.penalties.penalty import Penalty
from spectral_fairseq.plugin.flags import weight_flag

MEAN_VECTOR = Penalty(
    name="mean_vector",
    weight=weight_flag(
        "mean_vector_weight",
        "lambda of mu-loss: weight of the squared length of the mean of all output vectors",
    ),
    needs=output_table,
    value=lambda table, _: mean_vector_penalty(table.weight, table.excluded),
)
