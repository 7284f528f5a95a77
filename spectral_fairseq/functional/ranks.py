"""Fitting a prior of spectrum control, its c1, c2 and gamma, to a given spectrum.

The priors are those of :mod:`spectral_fairseq.functional.spectrum_penalties` (Wang et al., ICLR
2020, https://openreview.net/forum?id=ByxY8CNtvr, section 4.2), and the fit minimises that section's
R(Sigma) = sum_k (sigma_k - prior_k)^2.

Note [Fitting a decay]
----------------------
For given gamma and c2 the best c1 is linear, <sigma, f> / <f, f> with f the shape of the prior, so
only one parameter (polynomial) or two (exponential) are searched. The search uses grids that shrink
around their best point. It is deterministic, needs no derivatives, and copes with a flat valley. c2
is searched as the decay over the whole spectrum, t = c2 d^gamma, from no decay to exp(-40), because
the valley is curved in (gamma, c2). The gamma of the exponential prior is at least 0.1: below that
it approaches a polynomial decay of rate c2 gamma, with an unbounded c1. Where no decay fits best,
gamma is arbitrary and is returned as 1.
"""

from __future__ import annotations

import math
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import DataError

_ROUNDS = 30
_POINTS = 25
_SHRINK = 0.6
_GAMMA = (0.0, 6.0)
_LOG_DECAY = (-9.0, 3.7)  # natural logarithm of t


def fit_polynomial(sigma: Tensor) -> Dict[str, float]:
    """Return the best c1 and gamma of c1 k^-gamma.

    Args:
        sigma: singular values, shape (d,), d >= 2, not all zero, in any order.

    Returns:
        ``c1``, ``gamma`` and ``relative_error`` = sqrt(R / sum sigma_k^2).

    Raises:
        DataError: fewer than two values, all of them zero, or one that is not finite.
    """
    sigma, log_rank = _sorted_with_log_rank(sigma)

    def shapes(grid: Tensor) -> Tensor:
        return torch.exp(-grid[:, :1] * log_rank)  # [g, d]

    (gamma,), c1, error = _search(sigma, shapes, [_GAMMA])
    return {"c1": c1, "gamma": gamma, "relative_error": error}


def fit_exponential(sigma: Tensor) -> Dict[str, float]:
    """Return the best c1, c2 and gamma of c1 exp(-c2 k^gamma).

    Args:
        sigma: singular values, shape (d,), d >= 2, not all zero, in any order.

    Returns:
        ``c1``, ``c2``, ``gamma`` and ``relative_error`` = sqrt(R / sum sigma_k^2).

    Raises:
        DataError: fewer than two values, all of them zero, or one that is not finite.
    """
    sigma, log_rank = _sorted_with_log_rank(sigma)
    log_dim = float(log_rank[-1])

    def shapes(grid: Tensor) -> Tensor:
        # t (k/d)^gamma, from logarithms
        return torch.exp(-torch.exp(grid[:, 1:] + grid[:, :1] * (log_rank - log_dim)))  # [g, d]

    (gamma, log_decay), c1, error = _search(sigma, shapes, [(0.1, _GAMMA[1]), _LOG_DECAY])
    mean = float(sigma.mean())
    flat_error = float((sigma - mean).norm() / sigma.norm())
    if flat_error <= error * (1 + 1e-6) + 1e-9:
        return {"c1": mean, "c2": 0.0, "gamma": 1.0, "relative_error": flat_error}
    c2 = float(torch.tensor(log_decay - gamma * log_dim, dtype=torch.float64).exp())
    return {"c1": c1, "c2": c2, "gamma": gamma, "relative_error": error}


def _sorted_with_log_rank(sigma: Tensor) -> Tuple[Tensor, Tensor]:
    sigma = sigma.detach().double().cpu().abs().sort(descending=True).values
    if sigma.numel() < 2 or not (torch.isfinite(sigma).all() and float(sigma[0]) > 0):
        raise DataError(
            "at least two finite singular values, not all zero, to fit a decay to",
            f"{sigma.numel()} of them, the largest {float(sigma[0]) if sigma.numel() else 0:g}",
            "Check the table.",
        )
    rank = torch.arange(1, sigma.numel() + 1, dtype=torch.float64)
    return sigma, rank.log()


def _search(
    sigma: Tensor, shapes: Callable[[Tensor], Tensor], bounds: Sequence[Tuple[float, float]]
) -> Tuple[List[float], float, float]:
    """Minimise over c1 (in closed form) and over a box of one or two parameters."""
    scale = float(sigma.norm())
    windows = list(bounds)
    best, best_point, best_c1 = float("inf"), [low for low, _ in bounds], 0.0
    for _ in range(_ROUNDS):
        axes = [torch.linspace(low, high, _POINTS, dtype=torch.float64) for low, high in windows]
        grid = torch.cartesian_prod(*axes).reshape(-1, len(axes))  # [g, parameters]
        shape = shapes(grid)  # [g, d]
        c1 = (shape @ sigma) / shape.square().sum(1)  # [g]
        errors = (sigma - c1.unsqueeze(1) * shape).norm(dim=1) / scale
        at = int(errors.argmin())
        if float(errors[at]) < best:
            best, best_point, best_c1 = float(errors[at]), grid[at].tolist(), float(c1[at])
        windows = []
        for (low, high), centre, axis in zip(bounds, best_point, axes):
            half = _SHRINK * float(axis[-1] - axis[0]) / 2
            windows.append((max(low, centre - half), min(high, centre + half)))
    return best_point, best_c1, best


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


# Measures of a table that follow from its singular values, for training logs and reports.


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
#   relative
#   order min(N, d)^(-2/3);
# * two of them, independent of each other, have a linear CKA of d / (N + d), and an orthogonal
#   Procrustes residual of sqrt(1 - (8 / (3 pi))^2 d / N), because A'B has the spectrum of a d x d
#   matrix of independent entries.
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


def random_cka(count: int, dim: int, other_dim: Optional[int] = None) -> float:
    """Return the linear CKA of two independent random tables of N rows.

    Args:
        count: N.
        dim: d of one table.
        other_dim: d of the other one; the same if not given.
    """
    other_dim = other_dim or dim
    return math.sqrt(dim * other_dim / ((count + dim) * (count + other_dim)))


def random_procrustes(count: int, dim: int, other_dim: Optional[int] = None) -> Optional[float]:
    """Return the Procrustes residual of two independent random tables of N rows.

    It is the limit for many more rows than dimensions, in which the product of the two tables is
    a random matrix. It is None where N < 4 d for the larger d: at 2 d it is a fortieth off.

    Args:
        count: N.
        dim: d of one table.
        other_dim: d of the other one; the same if not given.
    """
    narrow, wide = sorted((dim, other_dim or dim))
    if count < 4 * wide:
        return None
    nuclear_norm = float(random_spectrum(wide, narrow, math.sqrt(narrow)).sum())
    return math.sqrt(1 - nuclear_norm**2 / (count * narrow * wide))


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
