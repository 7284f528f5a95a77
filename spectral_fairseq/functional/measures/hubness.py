"""Hubness: whether a few words are among the nearest neighbours of very many others.

Radovanovic, Nanopoulos, Ivanovic: "Hubs in Space: Popular Nearest Neighbors in High-Dimensional
Data", JMLR 11, 2010, https://jmlr.org/papers/v11/radovanovic10a.html. With N_k(i) the number of
words that have word i among their k nearest neighbours by cosine:

    hubness = E[(N_k - k)^3] / std(N_k)^3

the skewness of the k-occurrences, whose mean is k. It is positive for random vectors too, and grows
with d, so it is compared with that of a random table. All pairs are needed: callers pass a sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.measures.neighbours import nearest_neighbours

NEIGHBOURS = 10
_QUERIES = 1024  # each takes some 16,000 products at a time


@torch.no_grad()
def hubness(matrix: Tensor, neighbours: int = NEIGHBOURS) -> float:
    """Return the skewness of the k-occurrences; 0 where all words occur equally often.

    Args:
        matrix: a sample of the rows of W, shape (n, d).
        neighbours: k; n - 1 in a smaller table.

    Raises:
        DataError: fewer than two rows.
    """
    count = matrix.size(0)
    if count < 2:
        raise DataError("at least two rows for hubness", str(count), "Pass the whole table.")
    times = matrix.new_zeros(count, dtype=torch.float64)
    for rows in torch.arange(count, device=matrix.device).split(_QUERIES):
        _, found = nearest_neighbours(matrix, rows, neighbours)
        times += found.flatten().bincount(minlength=count)
    away = times - times.mean()
    spread = float(away.square().mean().sqrt())
    return float((away / spread).pow(3).mean()) if spread > 0 else 0.0
