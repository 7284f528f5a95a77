"""Empirical rank of a matrix of log-probabilities, and the distribution of its singular values.

Yang, Dai, Salakhutdinov, Cohen: "Breaking the Softmax Bottleneck", ICLR 2018,
https://openreview.net/forum?id=HkwZSG-CZ, section 3.3 and appendix C.1. A is tokens x words, A_tv
= log P(v | context t). A softmax over d dimensions has rank(A) <= d + 1; a mixture has no such
bound. The paper counts the singular values above the expected roundoff of Press et al.,
"Numerical Recipes", 3rd edition, section 2.6:

    threshold = 1/2 sqrt(m + n + 1) sigma_1 eps,      A of shape (m, n)

and draws, for x in [0, 1], the share of singular values with sigma_k / sigma_1 below x.
"""

from __future__ import annotations

import math
from typing import List, Sequence

import torch
from torch import Tensor

from spectral_fairseq.errors import DataError


def roundoff_threshold(
    largest: float, rows: int, columns: int, dtype: torch.dtype = torch.float32
) -> float:
    """Return 1/2 sqrt(m + n + 1) sigma_1 eps, below which a singular value is roundoff.

    Args:
        largest: sigma_1.
        rows: m.
        columns: n.
        dtype: in which the matrix was computed, which may differ from its present dtype.
    """
    return 0.5 * math.sqrt(rows + columns + 1) * largest * torch.finfo(dtype).eps


def empirical_rank(
    sigma: Tensor, rows: int, columns: int, dtype: torch.dtype = torch.float32
) -> int:
    """Return the number of singular values above :func:`roundoff_threshold`.

    Args:
        sigma: singular values, shape (min(m, n),), in any order.
        rows: m.
        columns: n.
        dtype: in which the matrix was computed.
    """
    if sigma.numel() == 0:
        return 0
    threshold = roundoff_threshold(float(sigma.max()), rows, columns, dtype)
    return int((sigma > threshold).sum())


def cumulative_share(sigma: Tensor, points: Sequence[float]) -> List[float]:
    """Return the share of singular values with sigma_k / sigma_1 <= x, for each x of ``points``.

    Args:
        sigma: singular values in any order, not all zero.
        points: x, between 0 and 1.

    Raises:
        DataError: no singular value is above zero.
    """
    if sigma.numel() == 0 or float(sigma.max()) <= 0:
        raise DataError(
            "a singular value above zero", "zeros only", "Check the matrix: it is zero."
        )
    normalised = (sigma.double() / sigma.double().max()).sort().values
    bounds = normalised.new_tensor(list(points))
    at = torch.searchsorted(normalised, bounds, right=True)
    return (at.double() / sigma.numel()).tolist()
