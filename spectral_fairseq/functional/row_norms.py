"""Euclidean norms of rows: one for each row, and rows divided by them.

Note [Short rows]
-----------------
A table keeps its directions when it is multiplied by 1e-19, but in float32 the squares of its
entries are then below the smallest number, and the norms become zero or coarse. Measures
therefore divide such rows by their largest entry before they square them, and know no length
below which a row has no direction: only zero rows have none, and differences from a mean vector
that are no longer than its rounding. Where one length has to be told from zero, the bound is
relative to the longest. In training, where a GPU is not asked which rows are short, because it
would have to be waited for, the squares are added up in float64.
"""

from __future__ import annotations

import math
from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.functional.autograd import check_untransformed, differentiable_once
from spectral_fairseq.functional.precision import at_least_float32, widened

# A row that is shorter, as a share of the longest, counts as a zero row.
SMALLEST_SHARE = 1e-12
# Converted to float64 at a time on a GPU: 512 MB.
_DEVICE_NUMBERS = 1 << 26


def _shortest(dtype: torch.dtype) -> float:
    """Return the length below which squares lose digits, which are summed in float32 or wider."""
    info = torch.finfo(at_least_float32(dtype))
    return math.sqrt(info.tiny) / info.eps


@torch.no_grad()
def exact_norms(matrix: Tensor) -> Tensor:
    """Return ||w_i||, shape (n,), exact for short rows too; the host waits for no GPU.

    Args:
        matrix: W, shape (n, d), of any floating dtype.
    """
    norms = torch.linalg.vector_norm(matrix, dim=1)
    short = norms < _shortest(matrix.dtype)
    if matrix.device.type == "cpu":
        if bool(short.any()):
            norms[short] = torch.linalg.vector_norm(matrix[short].double(), dim=1).to(norms.dtype)
    elif matrix.device.type == "cuda" and matrix.dtype != torch.float64:
        blocks = matrix.split(max(_DEVICE_NUMBERS // matrix.size(1), 1))
        wide = torch.cat([torch.linalg.vector_norm(block.double(), dim=1) for block in blocks])
        norms = torch.where(short, wide.to(norms.dtype), norms)
    return norms


class _RowNorms(torch.autograd.Function):
    """||w_i||, whose gradient w_i/||w_i|| is defined as zero for a zero row.

    The backward pass is one product; autograd's own rule adds a masked pass over the table.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        norms = exact_norms(matrix.reshape(-1, matrix.size(-1))).view(matrix.shape[:-1])
        ctx.save_for_backward(matrix, norms)
        return norms

    @staticmethod
    @differentiable_once("row_norms")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        matrix, norms = ctx.saved_tensors
        directed = norms >= 1 / torch.finfo(norms.dtype).max  # else 1/||w_i|| is infinite
        ratio = torch.where(directed, grad / norms, torch.zeros_like(grad))
        return matrix * ratio.unsqueeze(-1)


def row_norms(matrix: Tensor) -> Tensor:
    """Return the norms over the last dimension, (*, d) to (*); a zero row's gradient is zero."""
    check_untransformed()
    return _RowNorms.apply(matrix)


def rows_with_norms(rows: Tensor) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """Return rows in the same directions, their norms, and what short ones were divided by.

    See Note [Short rows].

    Args:
        rows: w_i, shape (n, d), float32 or float64.

    Returns:
        w_i / c_i, shape (n, d), which is ``rows`` itself unless some are short; their norms, zero
        for zero rows alone, shape (n,); and c_i, shape (n,), or None where all are 1.
    """
    norms = torch.linalg.vector_norm(rows, dim=1)
    short = norms < _shortest(rows.dtype)
    if not bool(short.any()):
        return rows, norms, None
    largest = torch.linalg.vector_norm(rows[short], float("inf"), dim=1)
    if not bool((largest > 0).any()):  # zero rows, such as that of padding
        return rows, norms, None
    divisors = torch.ones_like(norms)
    divisors[short] = torch.where(largest > 0, largest, torch.ones_like(largest))
    rows = rows / divisors.unsqueeze(1)
    return rows, torch.linalg.vector_norm(rows, dim=1), divisors


def row_lengths(rows: Tensor) -> Tensor:
    """Return ||w_i||, shape (n,), float64, exact for short rows too; float32 or float64 rows."""
    _, norms, divisors = rows_with_norms(rows)
    return norms.double() if divisors is None else norms.double() * divisors.double()


def unit_rows(matrix: Tensor) -> Tensor:
    """Return w_i / ||w_i||, shape (n, d), in float32 or wider; zero rows stay zero."""
    rows, norms, _ = rows_with_norms(widened(matrix.detach()))
    norms = norms.unsqueeze(1)
    return torch.where(norms > 0, rows / norms, torch.zeros_like(rows))


def rows_from(rows: Tensor, centre: Tensor) -> Tensor:
    """Return w_i - c, where differences no longer than the rounding of c are zero.

    Args:
        rows: w_i, shape (n, d), float32 or float64.
        centre: c, shape (d,).
    """
    centre = centre.to(rows.dtype)
    moved = rows - centre
    rounding = 4 * torch.finfo(rows.dtype).eps * row_lengths(centre[None])  # [1]
    return moved.masked_fill_((row_lengths(moved) <= rounding).unsqueeze(1), 0)
