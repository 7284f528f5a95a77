"""The singular-value priors of spectrum control, and the penalty that pulls a spectrum to them.

Wang, Huang, Huang, Hu, Wang, Gu: "Improving Neural Language Generation with Spectrum Control",
ICLR 2020, https://openreview.net/forum?id=ByxY8CNtvr, section 4.2:

    exponential:  P_e(gamma) = {W : sigma_k <= c1 exp(-c2 k^gamma)}
    polynomial:   P_p(gamma) = {W : sigma_k <= c1 k^-gamma}
    R(Sigma) = sum_k (sigma_k - prior_k)^2
"""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError

PRIORS = ("exponential", "polynomial")

DEFAULT_GAMMA = {"exponential": 1.0, "polynomial": 0.5}
"""The decay rate of each prior where users give none."""


def prior_spectrum(
    kind: str,
    dim: int,
    *,
    c1: Optional[float] = None,
    c2: float = 0.0,
    gamma: float = 1.0,
    frobenius_norm: Optional[float] = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the singular values of the prior, largest first.

    Args:
        kind: ``exponential`` for c1 exp(-c2 k^gamma), ``polynomial`` for c1 k^-gamma.
        dim: d, the number of singular values; k runs from 1 to d.
        c1: scale of the prior; ``None`` chooses it so that the prior's Euclidean norm, which is
            the Frobenius norm of a table with that spectrum, equals ``frobenius_norm``.
        c2: decay of the exponential prior; not used by the polynomial one.
        gamma: decay rate.
        frobenius_norm: required where ``c1`` is ``None``.
        dtype: of the result; it is computed in float64.

    Returns:
        Shape (d,), non-increasing and positive.

    Raises:
        ConfigurationError: an unknown kind, or a value outside its range.
    """
    for name, value in (("c1", c1), ("c2", c2), ("gamma", gamma)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ConfigurationError(
                f"`{name}` to be a finite number >= 0",
                repr(value),
                "Choose a value in that range.",
            )
    if c1 == 0:
        raise ConfigurationError(
            "`c1` to be a positive number",
            "0",
            "With 0 every singular value would be driven to zero; leave `c1` out to choose it "
            "automatically.",
        )
    k = torch.arange(1, dim + 1, dtype=torch.float64, device="cpu")
    if kind == "exponential":
        shape = torch.exp(-c2 * k**gamma)
    elif kind == "polynomial":
        shape = k**-gamma
    else:
        raise ConfigurationError(
            f"`kind` of prior to be one of {', '.join(PRIORS)}",
            repr(kind),
            "Correct `kind`.",
        )
    if c1 is None:
        if frobenius_norm is None:
            raise ConfigurationError(
                "`frobenius_norm` to be given where `c1` is chosen automatically",
                "None",
                "Pass the norm that the table should have, or a number for `c1`.",
            )
        norm = float(shape.norm())
        c1 = frobenius_norm / norm if norm else 0.0  # which is refused below
    prior = c1 * shape
    if not float(prior[-1].to(dtype)) > 0:
        raise ConfigurationError(
            "a prior whose smallest singular value is above zero",
            f"prior_{dim} = {float(prior[-1]):.3g} with kind={kind}, c2={c2}, gamma={gamma}",
            "Lower `c2` or `gamma`: such a steep prior leaves directions unused.",
        )
    return prior.to(dtype)


def spectrum_penalty(sigma: Tensor, prior: Tensor) -> Tensor:
    """Return R(Sigma) = sum_k (sigma_k - prior_k)^2, section 4.2 of the paper.

    A learned sigma has no fixed order or sign, because U and V can absorb both. |sigma| is
    therefore sorted in descending order before it is compared with the prior.

    Args:
        sigma: learned singular values, shape (d,).
        prior: target values, largest first, shape (d,).

    Returns:
        Scalar.
    """
    return (sigma.abs().sort(descending=True).values - prior).square().sum()
