"""The mean cosine between different words, the measure of representation degeneration.

Gao, He, Tan, Qin, Wang, Liu: "Representation Degeneration Problem in Training Natural Language
Generation Models", ICLR 2019, https://openreview.net/forum?id=SkEYojRqtm.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.linalg.row_blocks import checked_table
from spectral_fairseq.functional.penalties.cosine import cosine_penalty


@torch.no_grad()
def mean_cosine(matrix: Tensor, excluded: Optional[Tensor] = None) -> float:
    """Return the mean cosine over the N (N - 1) ordered pairs of different rows.

    The cosines of a zero row are taken as 0. The penalty of
    :mod:`spectral_fairseq.functional.penalties.cosine` divides the same sum by N^2.

    Args:
        matrix: W, shape (n, d).
        excluded: distinct indices of the rows to leave out (padding and the like), shape (m,);
            N = n - m >= 2.

    Raises:
        DataError: fewer than two rows remain.
    """
    matrix = checked_table(matrix)
    count = matrix.size(0) - (0 if excluded is None else excluded.numel())
    if count < 2:
        raise DataError(
            "at least two rows for a mean cosine",
            f"{count}",
            "Pass the whole embedding matrix.",
        )
    wide = matrix if matrix.dtype == torch.float64 else matrix.float()
    return float(cosine_penalty(wide, excluded)) * count / (count - 1)
