"""Over how many directions a spectrum is spread: effective rank, stable rank, largest share.

Roy, Vetterli: "The Effective Rank: A Measure of Effective Dimensionality", EUSIPCO 2007,
https://www.eurasip.org/Proceedings/Eusipco/Eusipco2007/Papers/a5p-h05.pdf:

    erank = exp(-sum_k p_k log p_k),    p_k = sigma_k / sum_j sigma_j

    share of the first = sigma_1 / sum_k sigma_k
    stable rank        = ||W||_F^2 / ||W||_2^2 = sum_k sigma_k^2 / sigma_1^2

The stable rank (Rudelson and Vershynin, J. ACM 2007, https://arxiv.org/abs/math/0503442) is never
above the rank, and unlike the rank it does not jump where a singular value vanishes.
"""

from __future__ import annotations

from typing import Dict

import torch
from torch import Tensor


def effective_rank(sigma: Tensor) -> float:
    """Return the effective rank.

    Args:
        sigma: singular values, shape (d,), >= 0, in any order.

    Returns:
        A number between 1 (a single direction) and d (all singular values equal); 0 for a zero
        table.
    """
    total = sigma.double().sum()
    if total <= 0:
        return 0.0
    share = sigma.double() / total
    return float(torch.special.entr(share).sum().exp())


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


def spectrum_measures(sigma: Tensor) -> Dict[str, float]:
    """Return numbers that summarise a spectrum, under the names that logs and reports use.

    Args:
        sigma: singular values, shape (d,), >= 0, in any order.

    Returns:
        ``sigma_max``, ``sigma_2`` (the second; 0 where d = 1), ``sigma_median``, ``sigma_min``,
        ``frobenius_norm``, ``share_of_first``, ``effective_rank``, ``stable_rank``; finite floats.
    """
    ordered = sigma.detach().double().sort(descending=True).values
    return {
        "sigma_max": float(ordered[0]),
        "sigma_2": float(ordered[1]) if ordered.numel() > 1 else 0.0,
        "sigma_median": float(ordered.median()),
        "sigma_min": float(ordered[-1]),
        "frobenius_norm": float(ordered.norm()),
        "share_of_first": share_of_first(ordered),
        "effective_rank": effective_rank(ordered),
        "stable_rank": stable_rank(ordered),
    }
