"""Singular values of a tall matrix, and its right singular vectors, from its d x d Gram matrix.

    W'W = V diag(sigma^2) V'

The Gram matrix costs N d^2 products and the eigendecomposition does not depend on N.

Note [Roundoff of a Gram matrix]
--------------------------------
Every function here follows one rule. The entries of W'W are sums of N products, whose roundoff
grows with sqrt(N), because its parts have either sign (https://doi.org/10.1137/18M1226312); the
eigensolver adds a few eps. So the eigenvalues are taken to be known to within

    eps (8 + sqrt(max(N, d))) sigma_1^2,    eps of the dtype in which the Gram matrix was computed.

A bound that holds even if all roundoff has one sign would grow with N itself. It would take most
singular values of a large degenerate table for zero.

An eigenvalue that is not above the first bound is not told from zero. Its singular value is
returned as exactly zero and receives no gradient. For 10,000 rows a singular value is therefore
resolved down to 1.5e-7 sigma_1 in float64 and 0.0036 sigma_1 in float32.

Note [Gradient through singular values]
---------------------------------------
d sigma_k / dW = u_k v_k' = W v_k v_k' / sigma_k. The rule holds for each simple singular value and
for every symmetric function of repeated ones. Autograd's own rule for an eigendecomposition divides
by differences of eigenvalues and is not finite where they meet. A function that treats equal values
differently, such as the distance from a prior that decays, has a kink there: the coefficients of
values that the eigensolver cannot tell apart are averaged, which is a subgradient and does not
depend on the basis that it chose for them.
"""

from __future__ import annotations

import math
from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import (
    DIVERGED,
    DataError,
)
from spectral_fairseq.functional.autograd import check_untransformed, differentiable_once
from spectral_fairseq.functional.gram import gram
from spectral_fairseq.functional.precision import widened


def roundoff(rows: int, columns: int, dtype: torch.dtype) -> float:
    """How well the eigenvalues of a Gram matrix are known, relative to the largest.

    See Note [Roundoff of a Gram matrix].

    Args:
        rows: N.
        columns: d.
        dtype: in which the Gram matrix was computed.
    """
    return torch.finfo(dtype).eps * (8 + math.sqrt(max(rows, columns)))


def _roots(eigenvalues: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Return sigma, largest first, of ascending eigenvalues; see Note [Roundoff of a Gram matrix].

    Args:
        eigenvalues: of W'W, shape (d,).
        rows: N.
        dtype: in which W'W was computed.
    """
    largest = eigenvalues[-1].clamp(min=0)
    noise = roundoff(rows, eigenvalues.numel(), dtype) * largest
    resolved = torch.where(eigenvalues > noise, eigenvalues, torch.zeros_like(eigenvalues))
    return resolved.sqrt().flip(0)


def require_finite(matrix: Tensor, what: str = "a matrix", remedy: str = DIVERGED) -> None:
    """Refuse what no eigensolver takes.

    Raises:
        DataError: an entry is infinite or not a number.
    """
    if not torch.isfinite(matrix).all():
        found = "infinity or NaN among them, or numbers too large to be squared"
        raise DataError(f"{what} of finite numbers", found, remedy)


def _equal_values(eigenvalues: Tensor) -> Tensor:
    """Return a number for each singular value, largest first; equal ones share a number."""
    resolution = 16 * torch.finfo(eigenvalues.dtype).eps * eigenvalues[-1]
    apart = -eigenvalues.flip(0).diff() > resolution
    return torch.cat([apart.new_zeros(1), apart]).cumsum(0)


class _SingularValues(torch.autograd.Function):
    """sigma, largest first; see Note [Gradient through singular values]."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, excluded: Optional[Tensor]) -> Tensor:
        gram_matrix = gram(matrix, excluded)
        require_finite(gram_matrix)
        eigenvalues, vectors = torch.linalg.eigh(gram_matrix)
        sigma = _roots(eigenvalues, matrix.size(0), matrix.dtype)
        ctx.save_for_backward(matrix, sigma, vectors.flip(1), _equal_values(eigenvalues))
        ctx.excluded = excluded
        return sigma

    @staticmethod
    @differentiable_once("singular_values")
    def backward(ctx: Any, grad: Tensor) -> Any:
        matrix, sigma, vectors, group = ctx.saved_tensors
        ratio = torch.where(sigma > 0, grad / sigma, torch.zeros_like(grad))
        total = torch.zeros_like(ratio).index_add_(0, group, ratio)
        equal = torch.zeros_like(ratio).index_add_(0, group, torch.ones_like(ratio))
        ratio = (total / equal.clamp(min=1))[group]
        with torch.autocast(matrix.device.type, enabled=False):  # a loop may call backward in it
            result = matrix @ ((vectors * ratio) @ vectors.t())  # [n, d]
        if ctx.excluded is not None:
            result.index_fill_(0, ctx.excluded, 0)
        return result, None


def singular_values(matrix: Tensor, excluded: Optional[Tensor] = None) -> Tensor:
    """Return the singular values of the rows that are not excluded, with a gradient for penalties.

    Everything is computed in the dtype of ``matrix``, or in float32 where that is wider.

    Args:
        matrix: W, shape (n, d), n >= d.
        excluded: indices of the rows to leave out (padding and the like), shape (m,).

    Returns:
        Shape (d,), largest first, differentiable once.

    Raises:
        DataError: an entry is infinite or not a number.
    """
    check_untransformed()
    return _SingularValues.apply(widened(matrix), excluded)


@torch.no_grad()
def singular_values_of_gram(gram_matrix: Tensor, rows: int) -> Tensor:
    """Return the singular values of a matrix whose Gram matrix is known.

    Args:
        gram_matrix: W'W, shape (d, d), in the dtype in which it was computed.
        rows: N, the number of rows of W.

    Returns:
        Shape (d,), float64, largest first, without a gradient.

    Raises:
        DataError: an entry is infinite or not a number.
    """
    require_finite(gram_matrix)
    return _roots(torch.linalg.eigvalsh(gram_matrix.double()), rows, gram_matrix.dtype)


@torch.no_grad()
def right_singular_system_of_gram(gram_matrix: Tensor, rows: int) -> Tuple[Tensor, Tensor]:
    """Return the singular values and right singular vectors of a matrix with this Gram matrix.

    Args:
        gram_matrix: W'W, shape (d, d), in the dtype in which it was computed.
        rows: N, the number of rows of W.

    Returns:
        sigma, shape (d,), largest first; and V, shape (d, d), whose column k belongs to sigma_k.
        Both have the dtype of the Gram matrix and no gradient.

    Raises:
        DataError: an entry is infinite or not a number.
    """
    require_finite(gram_matrix)
    eigenvalues, vectors = torch.linalg.eigh(gram_matrix)
    return _roots(eigenvalues, rows, gram_matrix.dtype), vectors.flip(1)
