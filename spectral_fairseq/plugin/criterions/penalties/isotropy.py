"""One minus the IsoScore of the output table, with a weight of either sign (I-STAR).

https://arxiv.org/abs/2305.19358
"""

import math

from spectral_fairseq.functional.penalties.isotropy import isoscore_penalty
from spectral_fairseq.plugin.criterions.penalties.needs import output_table
from spectral_fairseq.plugin.criterions.penalties.penalty import Penalty
from spectral_fairseq.plugin.flags import Flag, checked

ISOTROPY = Penalty(
    name="isotropy",
    weight=Flag(
        "isoscore_weight",
        0.0,
        "weight of 1 - IsoScore of the output table; a negative weight asks for less isotropy",
        checked("to be a finite number", math.isfinite),
    ),
    needs=output_table,
    value=lambda table, _: isoscore_penalty(table.weight, table.excluded),
)
