"""One minus the IsoScore of the output table, with a weight of either sign (I-STAR).

https://arxiv.org/abs/2305.19358
"""

import math

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.penalties.isotropy import isoscore_penalty
from spectral_fairseq.plugin.criterions.penalties.needs import output_table
from spectral_fairseq.plugin.criterions.penalties.penalty import Penalty
from spectral_fairseq.plugin.flags import Flag


def finite(value: float) -> float:
    """``value`` if it is a finite number of either sign.

    Raises:
        ConfigurationError: it is infinite or not a number.
    """
    if not math.isfinite(value):
        raise ConfigurationError("`value` to be a finite number", repr(value), "Correct it.")
    return value


ISOTROPY = Penalty(
    name="isotropy",
    weight=Flag(
        "isoscore_weight",
        0.0,
        "weight of 1 - IsoScore of the output table; a negative weight asks for less isotropy",
        finite,
    ),
    needs=output_table,
    value=lambda table, _: isoscore_penalty(table.weight, table.excluded),
)
