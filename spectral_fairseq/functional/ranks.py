"""Ranks of a spectrum: effective, stable and numerical, and those of a random table."""

from __future__ import annotations

import math
from typing import Dict, List, Sequence

import torch
from torch import Tensor

from spectral_fairseq.errors import DataError

# The effective rank: over how many directions a spectrum is spread.
#
# Roy, Vetterli: "The Effective Rank: A Measure of Effective Dimensionality", EUSIPCO 2007,
# https://www.eurasip.org/Proceedings/Eusipco/Eusipco2007/Papers/a5p-h05.pdf:
#
#     erank = exp(-sum_k p_k log p_k),    p_k = sigma_k / sum_j sigma_j


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


# The share of a spectrum that belongs to its first singular value.
#
#     share of the first = sigma_1 / sum_k sigma_k
#     stable rank        = ||W||_F^2 / ||W||_2^2 = sum_k sigma_k^2 / sigma_1^2
#
# The stable rank (Rudelson and Vershynin, J. ACM 2007, https://arxiv.org/abs/math/0503442) is never
# above the rank, and unlike the rank it does not jump where a singular value vanishes.


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


# What a random table of the same shape would measure: the zero point of every comparison.
#
# Its N d entries are independent Gaussians of the variance that gives it the root mean square row
# norm r of the table in question, r^2 / d. Then
#
# * the mean of its N rows has the norm r / sqrt(N);
# * cosines of different rows have the mean 0 and the standard deviation 1 / sqrt(d), and are
#   uncorrelated between pairs, so their mean over all pairs has the standard deviation
#   sqrt(2 / (N (N - 1) d));
# * its singular values follow the law of Marchenko and Pastur (Math. USSR-Sbornik 1, 1967,
#   https://doi.org/10.1070/SM1967v001n04ABEH001994): with y = d / N the values sigma^2 d / (N r^2)
#   have the density sqrt((b - x) (x - a)) / (2 pi y x) on [a, b], a, b = (1 -+ sqrt(y))^2. No
#   singular value is expected beyond the edge r (1 + sqrt(N / d)), up to fluctuations of the
#   relative order min(N, d)^(-2/3).
#
# Rows of different lengths, which every trained table has, put the first singular values somewhat
# beyond the edge even if their directions are random.


# Points of the integration: the quantiles are exact to about 1e-7 of the edge.
_GRID = 20001


def upper_edge(count: int, dim: int, rms_norm: float) -> float:
    """Return the largest singular value to be expected, r (1 + sqrt(N / d)).

    Args:
        count: N.
        dim: d.
        rms_norm: r, the root mean square of the row norms.
    """
    return rms_norm * (1 + math.sqrt(count / dim))


def random_spectrum(count: int, dim: int, rms_norm: float) -> Tensor:
    """Return the expected singular values, the quantiles (k - 1/2) / d of Marchenko and Pastur.

    Args:
        count: N.
        dim: d.
        rms_norm: r, the root mean square of the row norms.

    Returns:
        Shape (d,), float64, largest first; d - N zeros at the end where N < d.
    """
    long, short = max(count, dim), min(count, dim)
    ratio = short / long
    # x = 1 + y + 2 sqrt(y) cos(theta) turns the density into sin(theta)^2 / x.
    theta = torch.linspace(0, math.pi, _GRID, dtype=torch.float64)
    x = (1 + ratio + 2 * math.sqrt(ratio) * theta.cos()).clamp(min=1e-300)
    density = theta.sin().square() / x
    if ratio == 1:  # the limit at theta = pi, where both vanish
        density[-1] = 1.0
    mass = torch.cumulative_trapezoid(density, theta)
    mass = torch.cat([mass.new_zeros(1), mass]) / mass[-1]
    wanted = (torch.arange(short, dtype=torch.float64) + 0.5) / short
    at = torch.searchsorted(mass, wanted).clamp(1, _GRID - 1)
    part = (wanted - mass[at - 1]) / (mass[at] - mass[at - 1])
    squared = x[at - 1] + part * (x[at] - x[at - 1])
    sigma = (squared * long / dim).sqrt() * rms_norm
    return torch.cat([sigma, sigma.new_zeros(dim - short)])


def random_mean_share(count: int) -> float:
    """Return the expected norm of the mean row, relative to the row norms, for N rows."""
    return 1 / math.sqrt(count)


# Empirical rank of a matrix of log-probabilities, and the distribution of its singular values.
#
# Yang, Dai, Salakhutdinov, Cohen: "Breaking the Softmax Bottleneck", ICLR 2018,
# https://openreview.net/forum?id=HkwZSG-CZ, section 3.3 and appendix C.1. A is tokens x words, A_tv
# = log P(v | context t). A softmax over d dimensions has rank(A) <= d + 1; a mixture has no such
# bound. The paper counts the singular values above the expected roundoff of Press et al.,
# "Numerical Recipes", 3rd edition, section 2.6:
#
#     threshold = 1/2 sqrt(m + n + 1) sigma_1 eps,      A of shape (m, n)
#
# and draws, for x in [0, 1], the share of singular values with sigma_k / sigma_1 below x.


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
