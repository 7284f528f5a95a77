"""How far the columns of a matrix are from orthonormal, and the penalty built on it.

Wang et al., ICLR 2020, section 4.1:

    l1 ||U'U - I||_F^2 + l2 ||V'V - I||_F^2 + l3 ||U'U - I||_2^2 + l4 ||V'V - I||_2^2
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Gram(torch.autograd.Function):
    """M'M with d<G, M'M>/dM = M (G + G'), one product where autograd's own rule takes two."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(matrix)
        return matrix.t() @ matrix

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (matrix,) = ctx.saved_tensors
        return matrix @ (grad + grad.t())


def gram(matrix: Tensor, excluded: Optional[Tensor] = None) -> Tensor:
    """M'M over the rows that count.

    Args:
        matrix: shape (n, d).
        excluded: indices of the rows left out (padding and the like), shape (m,); few, so they
            are subtracted afterwards and the matrix is not copied.

    Returns:
        Shape (d, d).
    """
    product = _Gram.apply(matrix)
    if excluded is not None and excluded.numel() > 0:
        rows = matrix.index_select(0, excluded)  # [m, d]
        product = product - rows.t() @ rows
    return product


def identity_residual(gram_matrix: Tensor) -> Tensor:
    """E = G - I of a Gram matrix G, shape (d, d): zero where the columns are orthonormal."""
    return gram_matrix - torch.eye(
        gram_matrix.size(0), dtype=gram_matrix.dtype, device=gram_matrix.device
    )


def frobenius_defect(residual: Tensor) -> Tensor:
    """||E||_F^2 of a residual E = M'M - I, shape (d, d)."""
    return residual.square().sum()


def spectral_defect(residual: Tensor) -> Tensor:
    """||E||_2^2 of a symmetric residual E = M'M - I, shape (d, d), exact.

    A symmetric d x d eigendecomposition: power iteration from a random start reaches about half
    of the true value after one step.

    The gradient goes through x'Ex for the extreme eigenvector x alone, which is the derivative
    of a simple eigenvalue and a subgradient of a repeated one; autograd's own rule for the whole
    eigendecomposition divides by differences of eigenvalues and is not finite where they meet.
    """
    with torch.no_grad():
        values, vectors = torch.linalg.eigh(residual)
        extreme = vectors[:, values.abs().argmax()]  # [d]
    return (extreme @ residual @ extreme).square()


def orthogonality_penalty(
    u_gram: Tensor, v_gram: Tensor, weights: Tuple[float, float, float, float]
) -> Tensor:
    """l1 ||U'U-I||_F^2 + l2 ||V'V-I||_F^2 + l3 ||U'U-I||_2^2 + l4 ||V'V-I||_2^2.

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
