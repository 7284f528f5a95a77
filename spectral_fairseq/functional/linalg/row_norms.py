"""Euclidean norms of rows: one for each row, their root mean square, and rows divided by them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spectral_fairseq.functional.linalg.row_blocks import checked_table, row_blocks

# The direction of a shorter row is rounding error: such a row counts as a zero row.
SMALLEST_NORM = 1e-12


class _RowNorms(torch.autograd.Function):
    """||w_i||, whose gradient w_i/||w_i|| is defined as zero for a zero row.

    The backward pass is one product; autograd's own rule adds a masked pass over the table.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(matrix, dim=-1)
        ctx.save_for_backward(matrix, norms)
        return norms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        matrix, norms = ctx.saved_tensors
        ratio = torch.where(norms > 0, grad / norms, torch.zeros_like(grad))
        return matrix * ratio.unsqueeze(-1)


def row_norms(matrix: Tensor) -> Tensor:
    """Return the norms over the last dimension, (*, d) to (*); a zero row's gradient is zero."""
    return _RowNorms.apply(matrix)


@torch.no_grad()
def rms_row_norm(matrix: Tensor) -> float:
    """Return sqrt(mean_i ||w_i||^2) of W, shape (N, d), computed in float64.

    Raises:
        DataError: ``matrix`` is not a table.
    """
    matrix = checked_table(matrix)
    total = sum(float(block.square().sum()) for block in row_blocks(matrix))
    return (total / matrix.size(0)) ** 0.5


def unit_rows(matrix: Tensor) -> Tensor:
    """Return w_i / ||w_i||, shape (n, d), in float32 or wider; zero rows stay zero."""
    wide = matrix.detach()
    wide = wide if wide.dtype == torch.float64 else wide.float()
    norms = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    return torch.where(norms > SMALLEST_NORM, wide / norms, torch.zeros_like(wide))
