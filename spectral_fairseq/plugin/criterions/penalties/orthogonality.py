"""How far the factors of an SVD table are from orthonormal: Wang et al., ICLR 2020, section 4.1.

https://openreview.net/forum?id=ByxY8CNtvr
"""

from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.spectrum_penalties import orthogonality_penalty
from spectral_fairseq.plugin.criterions.penalties.needs import svd_tables
from spectral_fairseq.plugin.criterions.penalties.penalty import Penalty
from spectral_fairseq.plugin.flags import Flag, finite_nonnegative


def four_weights(text: str) -> Tuple[float, float, float, float]:
    """l1, l2, l3 and l4 of a text such as ``0.01,0.01,0,0``.

    Raises:
        ConfigurationError: ``text`` is not four numbers, or one of them cannot be a weight.
    """
    try:
        l1, l2, l3, l4 = (float(part) for part in str(text).split(","))
    except ValueError:
        raise ConfigurationError(
            "`value` to be four numbers separated by commas, l1,l2,l3,l4",
            repr(text),
            "For example: `value` 0.01,0.01,0,0.",
        ) from None
    for weight in (l1, l2, l3, l4):
        finite_nonnegative(weight)
    return l1, l2, l3, l4


def _value(tables: List[SVDEmbedding], options: Any) -> Tensor:
    values = []
    for table in tables:
        u_gram, v_gram = table.grams()
        values.append(orthogonality_penalty(u_gram, v_gram, options.orthogonality_weights))
    return torch.stack(values).sum()


ORTHOGONALITY = Penalty(
    name="orthogonality",
    weight=Flag(
        "orthogonality_weights",
        "0,0,0,0",
        "l1,l2,l3,l4: weights of ||U'U-I||_F^2, ||V'V-I||_F^2, ||U'U-I||_2^2 and ||V'V-I||_2^2 of "
        "an SVD table",
        four_weights,
        Optional[str],
    ),
    needs=svd_tables,
    value=_value,
)
