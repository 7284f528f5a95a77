"""Whether a table has been trained, or is as an initialisation left it.

Initialisations draw the numbers of a table independently, around zero and at one scale. The
lengths of N rows of d normal numbers then have the relative spread 1 / sqrt(2 d), those of
uniform ones less, and with e_i = w_i / ||w_i|| the number || sum_i e_i ||^2 / N is 1 on average,
with the standard deviation sqrt(2 / d). Training makes rows of frequent words longer or shorter,
and gives all rows a common direction, which soon is a hundred times what chance allows. The
bounds are 2.5 times the first number and eight standard deviations above the second, both beyond
every usual initialisation (normal, uniform, truncated, orthogonal). A table that was centred and
whose rows have equal lengths is not recognised, and one that has taken a few small steps is not
either.
"""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor

from spectral_fairseq.functional.row_blocks import rows_outside
from spectral_fairseq.functional.row_norms import row_lengths

_MOST_SPREAD = 2.5
_MOST_DEVIATIONS = 8.0


@torch.no_grad()
def looks_trained(matrix: Tensor, excluded: Optional[Tensor] = None) -> bool:
    """Whether the rows of a table are unlike those that an initialisation draws.

    Args:
        matrix: W, shape (N, d), of any floating dtype, finite.
        excluded: rows that are not counted, shape (m,); rows of zeros are not either.
    """
    rows = matrix[rows_outside(len(matrix), excluded, matrix.device)]
    norms = row_lengths(rows.float()).double()
    rows, norms = rows[norms > 0], norms[norms > 0]
    if len(rows) < 2:
        return False
    dim = rows.size(1)
    spread = float((norms / norms.mean()).std())
    common = torch.mv(rows.double().t(), 1 / norms)  # sum_i e_i
    shared = float(common.square().sum()) / len(rows)
    is_uneven = spread > _MOST_SPREAD / math.sqrt(2 * dim)
    has_direction = shared > 1 + _MOST_DEVIATIONS * math.sqrt(2 / dim)
    return is_uneven or has_direction
