"""Nearest neighbours of words by cosine."""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor

from spectral_fairseq.functional.linalg.row_norms import unit_rows


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
    found = rows.new_empty((len(rows), 0))
    for start in range(0, matrix.size(0), block_rows):
        block = unit_rows(matrix[start : start + block_rows])  # [b, d]
        index = torch.arange(start, start + len(block), device=rows.device)
        products = queries @ block.t()  # [q, b]
        products.masked_fill_(rows.unsqueeze(1) == index, float("-inf"))
        cosines = torch.cat([cosines, products], 1)
        found = torch.cat([found, index.expand(len(rows), -1)], 1)
        cosines, at = cosines.topk(min(count, cosines.size(1)), dim=1)
        found = found.gather(1, at)
    return cosines, found
