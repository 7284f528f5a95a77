"""The mean cosine between different words, the measure of representation degeneration.

Gao, He, Tan, Qin, Wang, Liu: "Representation Degeneration Problem in Training Natural Language
Generation Models", ICLR 2019, https://openreview.net/forum?id=SkEYojRqtm.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.linalg.row_blocks import checked_table, row_blocks
from spectral_fairseq.functional.linalg.row_norms import unit_rows


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
    dtype = torch.float64 if matrix.dtype == torch.float64 else torch.float32
    total = matrix.new_zeros(matrix.size(1), dtype=torch.float64)  # sum_i w_i / ||w_i||
    squares = 0.0  # sum_i ||w_i / ||w_i|| ||^2, the number of rows that are not zero
    for block in row_blocks(matrix, dtype=dtype):
        units = unit_rows(block)
        total += units.sum(0)
        squares += float(units.square().sum())
    if excluded is not None:
        units = unit_rows(matrix[excluded])
        total -= units.sum(0)
        squares -= float(units.square().sum())
    return (float(total.square().sum()) - squares) / (count * (count - 1))
