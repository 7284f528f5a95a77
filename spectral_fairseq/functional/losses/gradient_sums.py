"""Gradients of contexts, table and bias that are summed over blocks of tokens.

Note [Gradients in the forward pass]
------------------------------------
The loss is a scalar, so the gradient of a block's scores is known as soon as its scores are, up to
the one factor that arrives from above. Each block is multiplied out to the gradients of contexts,
table and bias at once and then discarded. This takes three matrix products for each block, where
recomputation in the backward pass would need four. What is kept between the passes has the size of
the contexts and of the table. It is kept in float32 and is rounded to the dtype of the parameters
only after the factor from above is applied: under loss scaling that factor keeps float16 gradients
from vanishing.

Note [Half precision]
---------------------
The gradients of a block's scores are rounded to the dtype of the products. In float16 numbers below
6e-8 would vanish, and most probabilities are smaller. Where products of float16 have float32
results (``linalg/products.py``), the gradients are between -1 and 1, and are multiplied by 2^15
first, the largest power of two in the range of float16; the products are divided by it. What is
below 2e-12 vanishes.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional, Tuple, TypeVar, Union

import torch
from torch import Tensor

from spectral_fairseq.functional.linalg.products import add_matmul_transposed_, matmul_transposed

FLOAT16_SCALE = 2.0**15

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function) -> Function:
    """Let ``torch.compile`` break its graph at ``function``, which runs as it does without.

    The losses by blocks choose their own kernels, look at numbers on the way, and hold as little
    as they can; a compiler that unrolls their loops fails at the first and undoes the last.
    """
    is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    if is_compiling is None:  # torch before 2.1
        return function
    uncompiled = torch._disable_dynamo(function)  # imports the compiler when it is called

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (uncompiled if is_compiling() else function)(*args, **kwargs)

    return run  # type: ignore[return-value]


class GradientSums:
    """Sums of gradients in the accumulation dtype; ``None`` for those that are not needed.

    Args:
        contexts: shape (rows, d), one row for each softmax.
        matrix: W, shape (N, d).
        bias: b, shape (N,), or ``None``.
        dtype: of the sums.
        needed: which of the three gradients autograd asks for.
        in_place: let the product add to the table's gradient, without a pass over the table for
            each block. It is slower for blocks of many tokens.
    """

    def __init__(
        self,
        contexts: Tensor,
        matrix: Tensor,
        bias: Optional[Tensor],
        dtype: torch.dtype,
        needed: Tuple[bool, bool, bool],
        in_place: bool = False,
    ) -> None:
        self.contexts, self.matrix, self.bias = (
            None
            if parameter is None or not needs
            else torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
            for parameter, needs in zip((contexts, matrix, bias), needed)
        )
        self.dtypes = (contexts.dtype, matrix.dtype, None if bias is None else bias.dtype)
        self.in_place = in_place

    def add_block(
        self,
        place: Union[slice, Tensor],
        rows: Tensor,
        probabilities: Tensor,
        table: Tensor,
        targets: Optional[Tensor] = None,
        weights: Optional[Tensor] = None,
        hits: Optional[Tensor] = None,
        first_word: int = 0,
    ) -> None:
        """Add the gradients that follow from d loss / d s = weights * p - hits * [v = target].

        The factors of each row are applied to tensors of d columns instead of N columns.

        Args:
            place: where the rows of the block belong in ``contexts``: a slice, if each row occurs
                in one block only, or distinct indices. Rows of the block beyond its end are
                padding and contribute zero; their gradients, weights and hits have to be zero.
            rows: contexts of the block, shape (r, d), in the dtype of the products.
            probabilities: p, shape (r, n); or, without ``weights``, the gradient of the scores. It
                is overwritten.
            table: rows of W for the n words, shape (n, d), in the dtype of the products.
            targets: column of each row's target, shape (r,); given together with ``hits``.
            weights: shape (r,).
            hits: shape (r,).
            first_word: index in W of the first column.
        """
        if self.contexts is None and self.matrix is None and self.bias is None:
            return
        dtype = probabilities.dtype
        words = slice(first_word, first_word + table.size(0))
        if self.bias is not None:
            bias_sum = self.bias[words]
            if weights is None:
                bias_sum += probabilities.sum(0)
            else:
                bias_sum += torch.mv(probabilities.t(), weights)
            if targets is not None and hits is not None:
                bias_sum.index_add_(0, targets, -hits)
        # See Note [Half precision].
        scale = FLOAT16_SCALE if rows.dtype == torch.float16 else 1.0
        if scale != 1.0:
            probabilities.mul_(scale)
        narrow = probabilities.to(rows.dtype)
        if self.contexts is not None:
            gradient = matmul_transposed(narrow, table.t()).to(dtype)  # [r, d]
            if scale != 1.0:
                gradient.div_(scale)
            if weights is not None:
                gradient.mul_(weights.unsqueeze(1))
            if targets is not None and hits is not None:
                gradient.addcmul_(table[targets].to(dtype), hits.unsqueeze(1), value=-1)
            if isinstance(place, slice):
                context_sum = self.contexts[place]
                context_sum.copy_(gradient[: context_sum.size(0)])
            else:
                self.contexts.index_add_(0, place, gradient[: place.size(0)])
        if self.matrix is not None:
            weighted = rows
            if weights is not None:
                weighted = (rows.to(dtype) * weights.unsqueeze(1)).to(rows.dtype)
            matrix_sum = self.matrix[words]  # [n, d]
            add_matmul_transposed_(
                matrix_sum, narrow.t(), weighted.t(), alpha=1 / scale, in_place=self.in_place
            )
            if targets is not None and hits is not None:
                matrix_sum.index_add_(0, targets, rows.to(dtype) * -hits.unsqueeze(1))

    def save(self, ctx: Any, *others: Tuple[Optional[Tensor], torch.dtype]) -> None:
        """Keep the sums for the backward pass.

        Args:
            ctx: context of the autograd function.
            others: further gradients to keep behind the three, each with the dtype of its input.
        """
        ctx.dtypes = (*self.dtypes, *(dtype for _, dtype in others))
        ctx.save_for_backward(
            self.contexts, self.matrix, self.bias, *(gradient for gradient, _ in others)
        )


def scaled_gradients(ctx: Any, factor: Tensor) -> Tuple[Optional[Tensor], ...]:
    """Return the saved gradients times the factor from above, in the dtypes of their inputs."""
    return tuple(
        None if gradient is None else (gradient * factor).to(dtype)
        for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes)
    )


def detached_without_grad(*inputs: Optional[Tensor]) -> Tuple[Any, ...]:
    """Return ``inputs``, detached where gradients are disabled.

    Under ``torch.no_grad`` autograd still reports ``needs_input_grad`` for tensors that could have
    a gradient, and a loss that computes gradients in the forward pass would compute them in vain.
    """
    if torch.is_grad_enabled():
        return inputs
    return tuple(None if tensor is None else tensor.detach() for tensor in inputs)
