"""The singular-value priors of spectrum control, and the penalty that pulls a spectrum to them.

Wang, Huang, Huang, Hu, Wang, Gu: "Improving Neural Language Generation with Spectrum Control",
ICLR 2020, https://openreview.net/forum?id=ByxY8CNtvr, section 4.2:

    exponential:  P_e(gamma) = {W : sigma_k <= c1 exp(-c2 k^gamma)}
    polynomial:   P_p(gamma) = {W : sigma_k <= c1 k^-gamma}
    R(Sigma) = sum_k (sigma_k - prior_k)^2

Flags: ``--spectrum-weight`` 0, ``--spectrum-prior`` exponential, ``--spectrum-c1`` auto,
    ``--spectrum-c2`` 0.0005, ``--spectrum-gamma``.
In order: ``methods/penalties.py: spectra``, ``Prior``, ``spectrum_penalty``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError, check_choice, check_range, check_shape

PRIORS = ("exponential", "polynomial")

DEFAULT_GAMMA = {"exponential": 1.0, "polynomial": 0.5}
"""The decay rate of each prior where users give none."""


@dataclass(frozen=True)
class Prior:
    """A prior of singular values, for tables of any width.

    Args:
        kind: ``exponential`` for c1 exp(-c2 k^gamma), ``polynomial`` for c1 k^-gamma.
        c1: scale of the prior; ``None`` chooses it so that the prior's Euclidean norm, which is
            the Frobenius norm of a table with that spectrum, is the one that is asked for.
        c2: decay of the exponential prior; not used by the polynomial one.
        gamma: decay rate; ``None`` is that of :data:`DEFAULT_GAMMA`.

    Raises:
        ConfigurationError: an unknown kind, or a value outside its range.
    """

    kind: str = "exponential"
    c1: Optional[float] = None
    c2: float = 0.0005
    gamma: Optional[float] = None

    def __post_init__(self) -> None:
        if self.gamma is None:
            object.__setattr__(self, "gamma", DEFAULT_GAMMA.get(self.kind, 1.0))
        check_choice("`kind` of prior", self.kind, PRIORS)
        remedy = "Correct it, or leave `c1` out."
        check_range("`c1`", self.c1, above=0, optional=True, remedy=remedy)
        check_range("`c2`", self.c2, at_least=0)
        check_range("`gamma`", self.gamma, at_least=0)
        self.spectrum(1, 1.0)

    def spectrum(
        self, dim: int, norm: Optional[float], dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """The singular values, largest first and positive, shape (dim,).

        Args:
            dim: d, the width of the table; k runs from 1 to d.
            norm: the Frobenius norm of a table with an automatic ``c1``; not used with any other.
            dtype: of the result; it is computed in float64.

        Raises:
            ConfigurationError: there is no norm for an automatic ``c1``, or the prior leaves
                directions unused at this width.
        """
        assert self.gamma is not None
        k = torch.arange(1, dim + 1, dtype=torch.float64, device="cpu")
        if self.kind == "exponential":
            shape = torch.exp(-self.c2 * k**self.gamma)
        else:
            shape = k**-self.gamma
        c1 = self.c1
        if c1 is None:
            check_range(
                "the norm of the table, to which an automatic `c1` refers,",
                norm,
                above=0,
                remedy="The table is zero or has diverged; or pass a number for `c1`.",
            )
            assert norm is not None
            length = float(shape.norm())
            c1 = norm / length if length else 0.0  # which is refused below
        prior = (c1 * shape).to(dtype)
        what = (
            f"the smallest singular value of the prior with kind={self.kind}, c2={self.c2}, "
            f"gamma={self.gamma}"
        )
        remedy = "Lower `c2` or `gamma`: such a steep prior leaves directions unused."
        check_range(what, float(prior[-1]), above=0, remedy=remedy)
        return prior


def check_rank(
    counted: int, dim: int, use: str = "`weight`", otherwise: str = "drop `weight`"
) -> None:
    """Refuse a table with fewer counted rows than dimensions, which has no d singular values.

    Args:
        counted: N, the number of rows that count.
        dim: d.
        use: what needs the singular values.
        otherwise: what to do if neither the table nor the dictionary can be changed.

    Raises:
        ConfigurationError: N < d.
    """
    if counted < dim:
        raise ConfigurationError(
            f"at least as many words as dimensions (N >= d) for {use}",
            f"N = {counted} words, padding and made-up rows left out, and d = {dim}",
            f"Use a narrower table or a larger dictionary, or {otherwise}.",
        )


def check_prior(prior: Tensor, sigma: Tensor) -> None:
    """Refuse a prior of another length than the spectrum.

    Raises:
        ConfigurationError: it has another.
    """
    check_shape("a prior", prior, sigma.shape, "Make the prior for the width of this table.")


def spectrum_penalty(sigma: Tensor, prior: Tensor) -> Tensor:
    """Return R(Sigma) = sum_k (sigma_k - prior_k)^2, section 4.2 of the paper.

    A learned sigma has no fixed order or sign, because U and V can absorb both. |sigma| is
    therefore sorted in descending order before it is compared with the prior.

    Args:
        sigma: learned singular values, shape (d,).
        prior: target values, largest first, shape (d,).

    Returns:
        Scalar.

    Raises:
        ConfigurationError: a prior of another length than the spectrum.
    """
    check_prior(prior, sigma)
    return (sigma.abs().sort(descending=True).values - prior).square().sum()
