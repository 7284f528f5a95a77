"""The share of a spectrum that belongs to its first singular value.

    share of the first = sigma_1 / sum_k sigma_k
    stable rank        = ||W||_F^2 / ||W||_2^2 = sum_k sigma_k^2 / sigma_1^2

The stable rank (Rudelson and Vershynin, J. ACM 2007, https://arxiv.org/abs/math/0503442) is never
above the rank, and unlike the rank it does not jump where a singular value vanishes.
"""

from __future__ import annotations

from torch import Tensor


def share_of_first(sigma: Tensor) -> float:
    """Return sigma_1 / sum_k sigma_k, from 1/d to 1, or 0 if all are 0; shape (d,), any order.

    The share of the *squared* singular values is 1 / :func:`stable_rank`.
    """
    total = float(sigma.double().sum())
    return float(sigma.double().max()) / total if total > 0 else 0.0


def stable_rank(sigma: Tensor) -> float:
    """Return sum_k sigma_k^2 / sigma_1^2, from 1 to d, or 0 if all are 0; shape (d,), any order."""
    largest = float(sigma.double().max())
    return float((sigma.double() / largest).square().sum()) if largest > 0 else 0.0
