"""Cosines between word vectors: their mean, the measure of degeneration, and their distribution.

Gao, He, Tan, Qin, Wang, Liu: "Representation Degeneration Problem in Training Natural Language
Generation Models", ICLR 2019, https://openreview.net/forum?id=SkEYojRqtm. With u_i = (w_i - c) /
||w_i - c||, where c is zero or the mean of the rows, over the N words of a group:

    mean cosine = (||sum_i u_i||^2 - sum_i ||u_i||^2) / (N (N - 1))

A vector that is added to all rows of an output table changes no probability, but it changes the
cosines. Those of the centred rows are what the likelihood can see.

The caller leaves out rows that stand for no word (padding, ``madeupword``).
"""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import check_enough
from spectral_fairseq.functional.precision import at_least_float32, full_float32
from spectral_fairseq.functional.row_blocks import cached_rows, checked_table, row_blocks
from spectral_fairseq.functional.row_norms import rows_from, rows_with_norms, unit_rows


@torch.no_grad()
def mean_cosine(
    matrix: Tensor, excluded: Optional[Tensor] = None, *, centre: Optional[Tensor] = None
) -> float:
    """Return the mean cosine over the N (N - 1) ordered pairs of different rows.

    The cosines of a zero row are taken as 0. The penalty of
    :mod:`spectral_fairseq.functional.cosine_penalty` divides the same sum by N^2.

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
    check_enough(count, 2, "rows for a mean cosine", "Pass the whole table.")
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
    dtype = at_least_float32(matrix.dtype)
    total = matrix.new_zeros((groups, matrix.size(1)), dtype=torch.float64)
    with_direction = total.new_zeros(groups)  # rows that are not zero
    block_rows = block_rows or cached_rows(matrix.size(1))
    for block, part in zip(row_blocks(matrix, block_rows, dtype), group.split(block_rows)):
        moved, norms, _ = rows_with_norms(block if centre is None else rows_from(block, centre))
        has_direction = norms > 0  # [b]
        inverse = torch.where(has_direction, 1 / norms, torch.zeros_like(norms))
        # One product adds the unit vectors of each group, without storing them.
        weights = inverse.new_zeros(groups, len(part)).scatter_(0, part[None], inverse[None])
        with full_float32(moved.device):
            total += weights @ moved
        with_direction.index_add_(0, part, has_direction.double())
    count = group.bincount(minlength=groups).double()
    mean = (total.square().sum(1) - with_direction) / (count * (count - 1))
    return torch.where(count > 1, mean, torch.full_like(mean, float("nan"))).tolist()


@torch.no_grad()
def cosine_histogram(
    matrix: Tensor, bins: int = 200, *, block_rows: int = 1024
) -> Tuple[List[float], List[int]]:
    """Count the cosines of all unordered pairs of different rows in ``bins`` equal bins of [-1, 1].

    The mean over all words takes time O(N d), the distribution all N^2 pairs: pass a sample of the
    words of a large table.

    Args:
        matrix: W, shape (N, d), N >= 2. The cosines of a zero row are taken as 0.
        bins: number of bins.
        block_rows: number of rows that are multiplied with all others at a time.

    Returns:
        The bins + 1 edges, and the counts, which add up to N (N - 1) / 2.

    Raises:
        DataError: fewer than two rows.
    """
    check_enough(matrix.size(0), 2, "rows for a distribution of cosines", "Pass the whole table.")
    units = unit_rows(matrix)
    # torch.histc counts in float32, which is exact up to 2^24 pairs in one call.
    block_rows = min(block_rows, max(2**24 // units.size(0), 1))
    counts = torch.zeros(bins, dtype=torch.float64)
    for start in range(0, units.size(0), block_rows):
        block = units[start : start + block_rows]  # [b, d]
        with full_float32(units.device):
            products = (block @ units[start:].t()).clamp_(-1, 1)  # [b, N - start]
        # Each pair once, and no row with itself: histc leaves out what is greater than 1.
        within = products[:, : len(block)]
        within.masked_fill_(torch.ones_like(within, dtype=torch.bool).tril_(), 2)
        counts += torch.histc(products.float(), bins, -1, 1).double().cpu()
    edges = torch.linspace(-1, 1, bins + 1, dtype=torch.float64)
    return edges.tolist(), [int(count) for count in counts.tolist()]


def positive_share(edges: Sequence[float], counts: Sequence[int]) -> float:
    """Return the share of the pairs whose cosine is not negative.

    Gao et al., section 3: "positive for almost all cases" in a degenerate table. It is one half in
    a random table.

    Args:
        edges: of the bins, increasing, with 0 among them.
        counts: one for each bin, not all zero.
    """
    return sum(count for edge, count in zip(edges, counts) if edge > -1e-9) / sum(counts)


@torch.no_grad()
def nearest_neighbours(
    matrix: Tensor, rows: Tensor, count: int, *, block_rows: int = 16384
) -> Tuple[Tensor, Tensor]:
    """Return the rows that have the greatest cosines with each of ``rows``, except itself.

    Args:
        matrix: W, shape (N, d).
        rows: indices, shape (q,).
        count: number of neighbours of each, at most N - 1.
        block_rows: number of rows that are compared at a time.

    Returns:
        Cosines and indices, each of shape (q, min(count, N - 1)), nearest first.
    """
    queries = unit_rows(matrix[rows])  # [q, d]
    count = min(count, matrix.size(0) - 1)
    cosines = queries.new_empty((len(rows), 0))
    neighbours = rows.new_empty((len(rows), 0))
    for start in range(0, matrix.size(0), block_rows):
        block = unit_rows(matrix[start : start + block_rows])  # [b, d]
        index = torch.arange(start, start + len(block), device=rows.device)
        with full_float32(queries.device):
            products = queries @ block.t()  # [q, b]
        products.masked_fill_(rows.unsqueeze(1) == index, float("-inf"))
        cosines = torch.cat([cosines, products], 1)
        neighbours = torch.cat([neighbours, index.expand(len(rows), -1)], 1)
        cosines, at = cosines.topk(min(count, cosines.size(1)), dim=1)
        neighbours = neighbours.gather(1, at)
    return cosines, neighbours
