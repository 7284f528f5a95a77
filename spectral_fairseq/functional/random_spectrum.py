"""What a random table of the same shape would measure: the zero point of every comparison.

Its N d entries are independent Gaussians of the variance that gives it the root mean square row
norm r of the table in question, r^2 / d. Then

* the mean of its N rows has the norm r / sqrt(N);
* cosines of different rows have the mean 0 and the standard deviation 1 / sqrt(d), and are
  uncorrelated between pairs, so their mean over all pairs has the standard deviation
  sqrt(2 / (N (N - 1) d));
* its singular values follow the law of Marchenko and Pastur (Math. USSR-Sbornik 1, 1967,
  https://doi.org/10.1070/SM1967v001n04ABEH001994): with y = d / N the values sigma^2 d / (N r^2)
  have the density sqrt((b - x) (x - a)) / (2 pi y x) on [a, b], a, b = (1 -+ sqrt(y))^2. No
  singular value is expected beyond the edge r (1 + sqrt(N / d)), up to fluctuations of the
  relative order min(N, d)^(-2/3).

Rows of different lengths, which every trained table has, put the first singular values somewhat
beyond the edge even if their directions are random.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

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
