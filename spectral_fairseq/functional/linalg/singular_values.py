"""Singular values of a tall matrix through its Gram matrix, with a closed gradient."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spectral_fairseq.functional.penalties.orthogonality import gram


class _SingularValues(torch.autograd.Function):
    """sigma_k = sqrt(eigenvalue_k(W'W)), dsigma_k/dW = u_k v_k' = W v_k v_k' / sigma_k.

    Note [Gradient through singular values]: that rule holds for each simple singular value, and
    for every symmetric function of repeated ones, which is what penalties are. Autograd's own
    rule for an eigendecomposition divides by differences of eigenvalues.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, excluded: Optional[Tensor]) -> Tensor:
        values, vectors = torch.linalg.eigh(gram(matrix, excluded))
        # Eigenvalues are known to within rounding of the largest; below that they are noise.
        noise = torch.finfo(values.dtype).eps * max(matrix.shape) * values[-1].clamp(min=0)
        sigma = torch.where(values > noise, values, torch.zeros_like(values)).sqrt().flip(0)
        ctx.save_for_backward(matrix, sigma, vectors.flip(1))
        ctx.excluded = excluded
        return sigma

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        matrix, sigma, vectors = ctx.saved_tensors
        ratio = torch.where(sigma > 0, grad / sigma, torch.zeros_like(grad))
        result = matrix @ ((vectors * ratio) @ vectors.t())  # [n, d]
        if ctx.excluded is not None:
            result[ctx.excluded] = 0
        return result, None


def singular_values(matrix: Tensor, excluded: Optional[Tensor] = None) -> Tensor:
    """Singular values of the rows that count, largest first.

    They come from the d x d Gram matrix, N d^2 products in each direction: a value below the
    largest times the root of (machine epsilon times N) is indistinguishable from zero, is given
    as zero, and receives no gradient. See Note [Gradient through singular values].

    Args:
        matrix: shape (n, d), n >= d.
        excluded: indices of the rows left out (padding and the like), shape (m,).

    Returns:
        Shape (d,).
    """
    return _SingularValues.apply(matrix, excluded)
