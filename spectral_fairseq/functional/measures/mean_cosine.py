"""The mean cosine between different words, the measure of representation degeneration.

Gao, He, Tan, Qin, Wang, Liu: "Representation Degeneration Problem in Training Natural Language
Generation Models", ICLR 2019, https://openreview.net/forum?id=SkEYojRqtm. With u_i = (w_i - c) /
||w_i - c||, where c is zero or the mean of the rows, over the N words of a group:

    mean cosine = (||sum_i u_i||^2 - sum_i ||u_i||^2) / (N (N - 1))

A vector that is added to all rows of an output table changes no probability, but it changes the
cosines. Those of the centred rows are what the likelihood can see.
"""

from __future__ import annotations

from typing import List, Optional

import torch
from torch import Tensor

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.linalg.row_blocks import cached_rows, checked_table, row_blocks
from spectral_fairseq.functional.linalg.row_norms import SMALLEST_NORM


@torch.no_grad()
def mean_cosine(
    matrix: Tensor, excluded: Optional[Tensor] = None, *, centre: Optional[Tensor] = None
) -> float:
    """Return the mean cosine over the N (N - 1) ordered pairs of different rows.

    The cosines of a zero row are taken as 0. The penalty of
    :mod:`spectral_fairseq.functional.penalties.cosine` divides the same sum by N^2.

    Args:
        matrix: W, shape (n, d).
        excluded: distinct indices of the rows to leave out (padding and the like), shape (m,);
            N = n - m >= 2.
        centre: c, shape (d,), which is subtracted from every row; nothing if not given.

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
    group = torch.zeros(matrix.size(0), dtype=torch.long, device=matrix.device)
    if excluded is not None:
        group[excluded] = 1
    return mean_cosines(matrix, group, 2, centre=centre)[0]


@torch.no_grad()
def mean_cosines(
    matrix: Tensor,
    group: Tensor,
    groups: int,
    *,
    centre: Optional[Tensor] = None,
    block_rows: Optional[int] = None,
) -> List[float]:
    """Return the mean cosine between different rows of the same group, for each group.

    The rows are read once, block by block.

    Args:
        matrix: W, shape (n, d), of any floating dtype.
        group: of each row, from 0 to ``groups`` - 1, shape (n,).
        groups: their number.
        centre: c, shape (d,), which is subtracted from every row; nothing if not given.
        block_rows: rows that are converted at a time; as many as stay in the cache if not given.

    Returns:
        One number for each group; NaN for a group of fewer than two rows.

    Raises:
        DataError: ``matrix`` is not a table.
    """
    matrix = checked_table(matrix)
    dtype = torch.float64 if matrix.dtype == torch.float64 else torch.float32
    total = matrix.new_zeros((groups, matrix.size(1)), dtype=torch.float64)
    with_direction = total.new_zeros(groups)  # rows that are not zero
    block_rows = block_rows or cached_rows(matrix.size(1))
    shift = None if centre is None else centre.to(dtype)
    for block, part in zip(row_blocks(matrix, block_rows, dtype), group.split(block_rows)):
        moved = block if shift is None else block - shift  # [b, d]
        norms = torch.linalg.vector_norm(moved, dim=1)  # [b]
        has_direction = norms > SMALLEST_NORM
        inverse = torch.where(has_direction, 1 / norms, torch.zeros_like(norms))
        # One product adds the unit vectors of each group, without storing them.
        weights = inverse.new_zeros(groups, len(part)).scatter_(0, part[None], inverse[None])
        total += weights @ moved
        with_direction.index_add_(0, part, has_direction.double())
    count = group.bincount(minlength=groups).double()
    mean = (total.square().sum(1) - with_direction) / (count * (count - 1))
    return torch.where(count > 1, mean, torch.full_like(mean, float("nan"))).tolist()
