"""The defects of the columns of U and V from orthonormality, and the penalty built on them.

Wang et al., ICLR 2020, https://openreview.net/forum?id=ByxY8CNtvr, section 4.1:

    l1 ||U'U - I||_F^2 + l2 ||V'V - I||_F^2 + l3 ||U'U - I||_2^2 + l4 ||V'V - I||_2^2

Flags: ``--orthogonality-weights`` 0,0,0,0.
In order: ``methods/penalties.py: required_svd_tables``, ``orthogonality_penalty``,
    ``identity_residual``, ``frobenius_defect``, ``spectral_defect``.
"""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor

from spectral_fairseq.functional.precision import full_float32
from spectral_fairseq.functional.spectra import require_finite


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
        return torch.dot(extreme, torch.mv(residual, extreme)).square()


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
