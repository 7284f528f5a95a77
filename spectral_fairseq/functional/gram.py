"""Gram matrices M'M: of a whole matrix, with a gradient, and accumulated over blocks of rows.

A Gram matrix is symmetric. The gradient of one therefore costs one product instead of two, and
the accumulated sum G = sum_b M_b' M_b costs little more than half the products: each block adds
only to strips of columns from the diagonal on, and the rest is mirrored once at the end.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.functional.autograd import check_untransformed, differentiable_once
from spectral_fairseq.functional.precision import full_float32, widened
from spectral_fairseq.functional.progress import ProgressCallback, ignore_progress
from spectral_fairseq.functional.row_blocks import BLOCK_ROWS, checked_table, row_blocks

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
    @differentiable_once("gram")
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        (matrix,) = ctx.saved_tensors
        with torch.autocast(matrix.device.type, enabled=False):  # a loop may call backward in it
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
    check_untransformed()
    return _Gram.apply(widened(matrix), excluded)


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


@torch.no_grad()
def table_gram(
    matrix: Tensor,
    *,
    excluded: Optional[Tensor] = None,
    block_rows: int = BLOCK_ROWS,
    progress: ProgressCallback = ignore_progress,
) -> Tensor:
    """Return the Gram matrix W'W of a table, shape (d, d), float64, without a gradient.

    Args:
        matrix: W, shape (N, d), of any floating dtype.
        excluded: rows that are not counted, shape (m,).
        block_rows: number of rows that are converted to float64 at a time.
        progress: called after each block with its number of rows.

    Raises:
        DataError: ``matrix`` is not a table.
    """
    matrix = checked_table(matrix)
    total = matrix.new_zeros((matrix.size(1), matrix.size(1)), dtype=torch.float64)
    for block in row_blocks(matrix, block_rows):
        accumulate_gram(total, block)
        progress(block.size(0))
    total = mirror_gram(total)
    if excluded is not None and excluded.numel():
        rows = matrix[excluded].double()
        total -= rows.t() @ rows
    return total
