"""Fitting a prior of spectrum control, its c1, c2 and gamma, to a given spectrum.

The priors are those of :mod:`spectral_fairseq.functional.penalties.spectrum` (Wang et al., ICLR
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

from typing import Callable, Dict, List, Sequence, Tuple

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
