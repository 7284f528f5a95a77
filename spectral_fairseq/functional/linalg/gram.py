"""Gram matrices M'M: of a whole matrix, with a gradient, and accumulated over blocks of rows.

A Gram matrix is symmetric. The gradient of one therefore costs one product instead of two, and the
accumulated sum G = sum_b M_b' M_b costs little more than half the products: each block adds only
to strips of columns from the diagonal on, and the rest is mirrored once at the end.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spectral_fairseq.functional.linalg.full_float32 import full_float32

# 8 strips need 9/16 of the products; strips narrower than this would not keep the cores busy.
_STRIPS = 8
_MIN_STRIP_WIDTH = 64


class _Gram(torch.autograd.Function):
    """M'M with d<G, M'M>/dM = M (G + G'), one product where autograd's own rule takes two."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, excluded: Optional[Tensor]) -> Tensor:
        ctx.save_for_backward(matrix)
        ctx.excluded = excluded
        with full_float32(matrix.device):
            product = matrix.t() @ matrix
            if excluded is not None:
                rows = matrix.index_select(0, excluded)  # [m, d]
                product -= rows.t() @ rows
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        (matrix,) = ctx.saved_tensors
        result = matrix @ (grad + grad.t())  # [n, d]
        if ctx.excluded is not None:
            # Exactly zero: Adam would make whole steps of what is left by rounding.
            result.index_fill_(0, ctx.excluded, 0)
        return result, None


def gram(matrix: Tensor, excluded: Optional[Tensor] = None) -> Tensor:
    """Return M'M over the rows that are not excluded, in float32 or wider.

    Args:
        matrix: M, shape (n, d), of any floating dtype.
        excluded: indices of the rows to leave out (padding and the like), shape (m,). They should
            be few: their share is subtracted afterwards, so that the matrix is not copied.

    Returns:
        Shape (d, d), differentiable once.
    """
    return _Gram.apply(matrix.to(torch.promote_types(matrix.dtype, torch.float32)), excluded)


def accumulate_gram(total: Tensor, block: Tensor) -> None:
    """Add M'M to the upper triangle of ``total``, leaving meaningless numbers below the diagonal.

    Args:
        total: shape (d, d), changed in place; :func:`mirror_gram` completes it after the last
            block.
        block: M, shape (b, d), of the same dtype.
    """
    dim = block.size(1)
    width = max(-(-dim // _STRIPS), _MIN_STRIP_WIDTH)
    for start in range(0, dim, width):
        strip = block[:, start : start + width]  # [b, width]
        with full_float32(block.device):
            total[start : start + width, start:].addmm_(strip.t(), block[:, start:])


def mirror_gram(total: Tensor) -> Tensor:
    """Copy the upper triangle below the diagonal, in place and without a second d x d matrix.

    Args:
        total: shape (d, d), as :func:`accumulate_gram` left it.

    Returns:
        ``total``.
    """
    dim = total.size(0)
    width = max(-(-dim // _STRIPS), _MIN_STRIP_WIDTH)
    for start in range(0, dim, width):
        end = start + width
        square = total[start:end, start:end]
        square.copy_(square.triu() + square.triu(1).t())
        total[end:, start:end].copy_(total[start:end, end:].t())
    return total
