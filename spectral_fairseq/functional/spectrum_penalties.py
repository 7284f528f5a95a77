"""The singular-value priors of spectrum control, and the penalty that pulls a spectrum to them.

Wang, Huang, Huang, Hu, Wang, Gu: "Improving Neural Language Generation with Spectrum Control",
ICLR 2020, https://openreview.net/forum?id=ByxY8CNtvr, section 4.2:

    exponential:  P_e(gamma) = {W : sigma_k <= c1 exp(-c2 k^gamma)}
    polynomial:   P_p(gamma) = {W : sigma_k <= c1 k^-gamma}
    R(Sigma) = sum_k (sigma_k - prior_k)^2

Flags: ``--spectrum-weight`` 0, ``--spectrum-prior`` exponential, ``--spectrum-c1`` auto,
    ``--spectrum-c2`` 0.0005, ``--spectrum-gamma``, ``--orthogonality-weights`` 0,0,0,0,
    ``--spectral-normalization-weight`` 0, ``--d-optimal-weight`` 0,
    ``--normalized-d-optimal-weight`` 0.
In order: ``methods/penalties.py: spectra``, ``Prior``, ``spectrum_penalty``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError, check_choice, check_range
from spectral_fairseq.functional.precision import full_float32
from spectral_fairseq.functional.spectra import require_finite

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
            if norm is None:
                raise ConfigurationError(
                    "`norm` to be given where `c1` is chosen automatically",
                    "None",
                    "Pass the norm that the table should have, or a number for `c1`.",
                )
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


# The defects of a matrix's columns from orthonormality, and the penalty built on them, section 4.1:
#
#     l1 ||U'U - I||_F^2 + l2 ||V'V - I||_F^2 + l3 ||U'U - I||_2^2 + l4 ||V'V - I||_2^2


def identity_residual(gram_matrix: Tensor) -> Tensor:
    """Return E = G - I of a Gram matrix G, shape (d, d): zero where the columns are orthonormal."""
    return gram_matrix - torch.eye(
        gram_matrix.size(0), dtype=gram_matrix.dtype, device=gram_matrix.device
    )


def frobenius_defect(residual: Tensor) -> Tensor:
    """Return ||E||_F^2 of a residual E = M'M - I, shape (d, d)."""
    return residual.square().sum()


def spectral_defect(residual: Tensor) -> Tensor:
    """Return ||E||_2^2 of a symmetric residual E = M'M - I, shape (d, d).

    On a CPU the value is exact, from a symmetric d x d eigendecomposition; on a GPU, which an
    eigendecomposition would keep waiting, it is that of :func:`dominant_vector`. (One step of power
    iteration from a random start reaches about half of the true value.)

    The gradient goes through x'Ex for the extreme eigenvector x alone, which is the derivative of a
    simple eigenvalue and a subgradient of a repeated one. Autograd's own rule for the whole
    eigendecomposition divides by differences of eigenvalues and is not finite where they meet.
    """
    with full_float32(residual.device):
        if residual.is_cuda:
            return torch.mv(residual, dominant_vector(residual)).square().sum()
        with torch.no_grad():
            require_finite(residual)
            values, vectors = torch.linalg.eigh(residual)
            extreme = vectors[:, values.abs().argmax()]  # [d]
        return (extreme @ residual @ extreme).square()


@torch.no_grad()
def dominant_vector(symmetric: Tensor, squarings: int = 12) -> Tensor:
    """Return a unit vector x whose ||Ex|| is the spectral norm of a symmetric E, shape (d, d).

    x is the longest column of E^(2^squarings), from matrix products only. Where the size of an
    eigenvalue lies just below the largest, x mixes their vectors, and ||Ex|| is below the spectral
    norm by less than log(d) / 2^(squarings + 1) of it: 0.1 % at d = 1,024. Eigenvalues of equal
    size and opposite sign may mix without any loss, which x'Ex would not survive.

    Returns:
        Shape (d,), without a gradient; zero for a zero matrix.
    """
    tiny = torch.finfo(symmetric.dtype).tiny
    power = symmetric / symmetric.norm().clamp(min=tiny)
    with full_float32(symmetric.device):
        for _ in range(squarings):
            power = power @ power
            power /= power.norm().clamp(min=tiny)
    lengths = torch.linalg.vector_norm(power, dim=0)  # [d]
    longest = lengths.argmax().unsqueeze(0)
    return (power.index_select(1, longest) / lengths.max().clamp(min=tiny)).squeeze(1)


def orthogonality_penalty(
    u_gram: Tensor, v_gram: Tensor, weights: Tuple[float, float, float, float]
) -> Tensor:
    """Return l1 ||U'U-I||_F^2 + l2 ||V'V-I||_F^2 + l3 ||U'U-I||_2^2 + l4 ||V'V-I||_2^2.

    Args:
        u_gram: U'U, shape (d, d).
        v_gram: V'V, shape (d, d).
        weights: l1, l2, l3, l4 >= 0; a term of weight 0 is not computed.

    Returns:
        Scalar.
    """
    total = u_gram.new_zeros(())
    for gram_matrix, frobenius_weight, spectral_weight in (
        (u_gram, weights[0], weights[2]),
        (v_gram, weights[1], weights[3]),
    ):
        if not (frobenius_weight or spectral_weight):
            continue
        residual = identity_residual(gram_matrix)
        if frobenius_weight:
            total = total + frobenius_weight * frobenius_defect(residual)
        if spectral_weight:
            total = total + spectral_weight * spectral_defect(residual)
    return total


# Spectral normalisation as a penalty, which pulls every singular value to the largest one.
#
# Jiang, Chen, Chen, Liu, Wang, Zhao: "On Computation and Generalization of Generative Adversarial
# Networks under Spectrum Control", ICLR 2019, https://openreview.net/forum?id=rJNH6sAqY7, divide
# the spectrum of a weight by its largest value, sigma_k / max sigma. Appendix B of Wang et al.
# compares with it and describes its effect: "encourage all the singular values close to the largest
# one".
#
# Note [Spectral normalisation with a weight]
# -------------------------------------------
# A normalisation has no weight, but a penalty needs one. Dividing a whole table by its largest
# singular value would also fix the scale of the logits at every step, which could not be combined
# with a plain checkpoint or with any other penalty. The penalty is therefore the squared distance
# of the normalised spectrum from the flat one,
#
#     R = sum_k (1 - sigma_k / sigma_1)^2
#
# It is zero exactly where appendix B says that the method leads. It depends on the spectrum only
# through the paper's sigma / max sigma and therefore, like a normalised weight, not on the scale of
# the table. The appendix's second comparator, "SN + D-optimal", is the sum of this and
# :func:`d_optimal_penalty`.


def spectral_normalization_penalty(sigma: Tensor) -> Tensor:
    """Return R = sum_k (1 - |sigma_k| / max |sigma|)^2.

    See Note [Spectral normalisation with a weight].

    Args:
        sigma: singular values in any order and of any sign, shape (d,): the learned ones of an SVD
            table, or those of
            :func:`~spectral_fairseq.functional.spectra.singular_values`.

    Returns:
        Scalar between 0 (all values equal) and d - 1 (rank one). A zero spectrum gives d and
        finite gradients.
    """
    values = sigma.abs()
    largest = values.max()
    return (1 - values / torch.where(largest > 0, largest, torch.ones_like(largest))).square().sum()


# The D-optimal regulariser, which enlarges the volume that the columns of a table span.
#
# It too is of Jiang et al., and a comparator of Wang et al.:
#
#     R = -sum_k log sigma_k = -1/2 log det(W'W),     dR/dW = -W (W'W)^-1
#
# Jiang et al. take the spectrum of a weight that is divided by its largest singular value:
#
#     R = -sum_k log(sigma_k / sigma_1)


def d_optimal_penalty(sigma: Tensor) -> Tensor:
    """Return R = -sum_k log |sigma_k|.

    R has no minimum: it falls by d log c for a table c times as large. Weight decay, a
    spectral-norm table or another penalty has to bound it; the form that Jiang et al. use is
    :func:`normalized_d_optimal_penalty`.

    Args:
        sigma: singular values in any order and of any sign, shape (d,): the learned ones of an SVD
            table, or those of
            :func:`~spectral_fairseq.functional.spectra.singular_values`. Values
            below machine epsilon times the largest count as that bound and receive no gradient, so
            that R stays finite where the rank is not full.

    Returns:
        Scalar.
    """
    values = sigma.abs()
    info = torch.finfo(values.dtype)
    floor = (values.detach().max() * info.eps).clamp(min=info.tiny)
    return -torch.maximum(values, floor).log().sum()


def normalized_d_optimal_penalty(sigma: Tensor) -> Tensor:
    """Return R = -sum_k log(|sigma_k| / max |sigma|), which does not depend on the table's scale.

    Args:
        sigma: as for :func:`d_optimal_penalty`. A share below machine epsilon counts as that bound.

    Returns:
        Scalar of at least 0, which is reached where all values are equal.
    """
    values, info = sigma.abs(), torch.finfo(sigma.dtype)
    shares = values / values.max().clamp(min=info.tiny)
    # A share at the bound is a constant: it pulls at neither sigma_k nor sigma_1.
    return -shares.clamp(min=info.eps).log().sum()
