"""Identity whose gradient is multiplied by a constant."""

from __future__ import annotations

from typing import Any, Tuple

import torch
from torch import Tensor


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        return grad * ctx.scale, None


def scaled_gradient(values: Tensor, scale: float) -> Tensor:
    """``values`` themselves, of any shape, whose gradient is multiplied by ``scale``."""
    return _ScaledGradient.apply(values, scale)
