"""Leaving out the tokens whose target is padding.

To find them is the one point at which a loss has to wait for a GPU: the number of the others is the
shape of all that follows. A boolean mask would search, and wait, once for each tensor and again for
its gradient.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _DistinctRows(torch.autograd.Function):
    """Rows of a tensor, each at most once, so that their gradients are copied and not added."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = values.shape
        return values.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy_(0, rows, grad), None


def without_ignored(ignore_index: Optional[int], targets: Tensor, *values: Any) -> Tuple[Any, ...]:
    """Return the targets that count, and the rows of ``values`` that belong to them.

    Args:
        ignore_index: target whose tokens are left out; ``None`` leaves out none.
        targets: shape (T,).
        values: tensors of shape (T, *), differentiable once, or ``None``, which stays ``None``.
    """
    if ignore_index is None:
        return (targets, *values)
    kept = targets.ne(ignore_index).nonzero().squeeze(1)
    rows = (None if each is None else _DistinctRows.apply(each, kept) for each in values)
    return (targets[kept], *rows)
