"""Gradients that are not autograd's own: computed in the forward pass or by hand, or changed.

A second derivative of a function with such a gradient would be that of a constant.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Callable, Tuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from spectral_fairseq.errors import UnsupportedError

Function = TypeVar("Function", bound=Callable[..., Any])


def differentiable_once(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of ``backward``, which refuses second derivatives of a function by name.

    torch's own ``once_differentiable`` refuses them only where the gradient from above has a
    gradient itself; elsewhere the second derivative would be wrong in silence.

    Args:
        name: of the function, for readers of the error.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        once = once_differentiable(backward)

        @wraps(backward)
        def first_only(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():  # under create_graph=True alone
                raise UnsupportedError(
                    f"first derivatives of {name} alone",
                    "a graph for second ones (create_graph=True), as a gradient penalty asks for",
                    "Take second derivatives of dense scores, of a model without methods of "
                    "spectral_fairseq.training; in fairseq with --loss-form dense.",
                )
            return once(ctx, *gradients)

        return first_only

    return decorate


_is_compiling: Any = getattr(getattr(torch, "compiler", None), "is_compiling", None)
# torch before 2.0 has no transforms.
_transforms_are_active: Any = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def is_transformed() -> bool:
    """Whether the call is within a transform of ``torch.func``, and no compiler looks at it."""
    if _is_compiling is None or _is_compiling():  # torch before 2.1; a compiler
        return False
    return bool(_transforms_are_active())


def check_untransformed() -> None:
    """Refuse the transforms of ``torch.func``, which cannot look into a gradient by hand.

    Raises:
        UnsupportedError: the call is within one.
    """
    if is_transformed():
        raise UnsupportedError(
            "losses by blocks and penalties outside of the transforms of torch.func",
            "a call within one (grad, vmap, jvp or another)",
            "Take gradients by torch.autograd.grad; or transform a loss of dense scores, of a "
            "model without methods of spectral_fairseq.training.",
        )


def outside_graphs(function: Function) -> Function:
    """Let ``torch.compile`` break its graph at ``function``, which runs as it does without.

    The losses by blocks choose their own kernels, look at numbers on the way, and hold as little
    as they can; a compiler that unrolls their loops fails at the first and undoes the last. The
    transforms of ``torch.func`` are refused: their tensors have no numbers to look at.
    """
    if _is_compiling is None:  # torch before 2.1
        return function
    uncompiled = torch._disable_dynamo(function)  # imports the compiler when it is called

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return uncompiled(*args, **kwargs)
        check_untransformed()
        return function(*args, **kwargs)

    return run  # type: ignore[return-value]


class _RowWithoutGradient(torch.autograd.Function):
    """A view of a tensor, of which one row receives no gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, row: int) -> Tensor:
        ctx.row = row
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        # It is taken out of a copy, since autograd may hand the same gradient on to other tensors.
        grad = grad.clone()
        grad[ctx.row].zero_()
        return grad, None


def row_detached(values: Tensor, row: int) -> Tensor:
    """A copy of ``values``, shape (n, *), of which one row receives no gradient."""
    chosen = torch.arange(values.size(0), device=values.device).eq(row)
    chosen = chosen.view([-1] + [1] * (values.dim() - 1))
    return torch.where(chosen, values.detach(), values)


def row_without_gradient(values: Tensor, row: int) -> Tensor:
    """``values``, shape (n, *), of which one row receives no gradient.

    It is a view of them, but a copy in TorchScript and in transforms of ``torch.func`` and forward
    derivatives, which cannot look into a gradient by hand. ``torch.jit.trace``, whose result
    computes without gradients, gets ``values``.
    """
    if torch.jit.is_scripting():
        return row_detached(values, row) if values.requires_grad else values
    if torch.jit.is_tracing():
        return values
    if _transforms_are_active() or forward_ad._current_level >= 0:
        return row_detached(values, row)
    viewed: Tensor = _RowWithoutGradient.apply(values, row)
    return viewed
