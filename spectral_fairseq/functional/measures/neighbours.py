"""Nearest neighbours of words by cosine."""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor

from spectral_fairseq.functional.penalties.cosine import SHORTEST


def unit_rows(matrix: Tensor) -> Tensor:
    """w_i / ||w_i||, shape (n, d), float32 at least; a zero row has no direction and stays zero."""
    exact = matrix.detach()
    exact = exact if exact.dtype == torch.float64 else exact.float()
    norms = torch.linalg.vector_norm(exact, dim=1, keepdim=True)
    return torch.where(norms > SHORTEST, exact / norms, torch.zeros_like(exact))


@torch.no_grad()
def nearest_neighbours(
    matrix: Tensor, rows: Tensor, count: int, *, block_rows: int = 16384
) -> Tuple[Tensor, Tensor]:
    """The rows whose cosine with each of ``rows`` is greatest, itself left out.

    Args:
        matrix: W, shape (N, d).
        rows: indices, shape (q,).
        count: neighbours of each; fewer where N - 1 is smaller.
        block_rows: rows compared at a time.

    Returns:
        Cosines and indices, each of shape (q, min(count, N - 1)), the nearest first.
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
