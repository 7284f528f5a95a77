"""The distribution of the cosines between different words.

Their mean over all words takes only time O(N d) (``mean_cosine.py``). The distribution needs all
N^2 pairs, so callers pass a sample of the words of a large table.
"""

from __future__ import annotations

from typing import List, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.linalg.row_norms import unit_rows


@torch.no_grad()
def cosine_histogram(
    matrix: Tensor, bins: int = 200, *, block_rows: int = 1024
) -> Tuple[List[float], List[int]]:
    """Count the cosines of all unordered pairs of different rows in ``bins`` equal bins of [-1, 1].

    Args:
        matrix: W, shape (N, d), N >= 2. The cosines of a zero row are taken as 0.
        bins: number of bins.
        block_rows: number of rows that are multiplied with all others at a time.

    Returns:
        The bins + 1 edges, and the counts, which add up to N (N - 1) / 2.

    Raises:
        DataError: fewer than two rows.
    """
    if matrix.size(0) < 2:
        raise DataError(
            "at least two rows for a distribution of cosines",
            str(matrix.size(0)),
            "Pass the whole table.",
        )
    units = unit_rows(matrix)
    # torch.histc counts in float32, which is exact up to 2^24 pairs in one call.
    block_rows = min(block_rows, max(2**24 // units.size(0), 1))
    counts = torch.zeros(bins, dtype=torch.float64)
    for start in range(0, units.size(0), block_rows):
        block = units[start : start + block_rows]  # [b, d]
        products = (block @ units[start:].t()).clamp_(-1, 1)  # [b, N - start]
        # Each pair once, and no row with itself.
        above = torch.ones_like(products, dtype=torch.bool).triu_(1)
        counts += torch.histc(products[above].float(), bins, -1, 1).double().cpu()
    edges = torch.linspace(-1, 1, bins + 1, dtype=torch.float64)
    return edges.tolist(), [int(count) for count in counts.tolist()]


def histogram_quantiles(
    edges: Sequence[float], counts: Sequence[int], shares: Sequence[float]
) -> List[float]:
    """Return quantiles of a histogram, interpolated linearly within its bins.

    Args:
        edges: the bins + 1 edges, increasing.
        counts: one for each bin, not all zero.
        shares: the share of the mass below each quantile, between 0 and 1.
    """
    below = torch.tensor([0, *counts], dtype=torch.float64).cumsum(0)
    below /= below[-1].clone()
    wanted = []
    for share in shares:
        at = int(torch.searchsorted(below, torch.tensor(share, dtype=torch.float64)))
        at = min(max(at, 1), len(counts))
        width = float(below[at] - below[at - 1])
        part = (share - float(below[at - 1])) / width if width > 0 else 0.0
        wanted.append(edges[at - 1] + part * (edges[at] - edges[at - 1]))
    return wanted


def positive_share(edges: Sequence[float], counts: Sequence[int]) -> float:
    """Return the share of the pairs whose cosine is not negative.

    Gao et al., ICLR 2019, https://openreview.net/forum?id=SkEYojRqtm, section 3: "positive for
    almost all cases" in a degenerate table. It is one half in a random table.

    Args:
        edges: of the bins, increasing, with 0 among them.
        counts: one for each bin, not all zero.
    """
    return sum(count for edge, count in zip(edges, counts) if edge > -1e-9) / sum(counts)
