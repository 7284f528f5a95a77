"""Log-probabilities of targets over a large vocabulary, for losses that are functions of them.

    log p_y = s_y - log Z,        d log p_y / d s = [v = y] - p,

by blocks of tokens, so that no pass holds tokens x N scores. Losses of reinforcement learning need
them with a gradient (GRPO, https://arxiv.org/abs/2402.03300).

In order: ``training/token_loss.py: TokenLoss``, ``blockwise_log_probs``.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import check_range
from spectral_fairseq.functional.autograd import differentiable_once, outside_graphs
from spectral_fairseq.functional.block_softmaxes import BlockSoftmax, BlockSoftmaxes
from spectral_fairseq.functional.blocks import (
    aligned,
    at_rows,
    check_loss_shapes,
    detached_without_grad,
    kept_rows,
    padded,
    product_dtype,
)
from spectral_fairseq.functional.gradient_sums import GradientSums, scaled_gradients
from spectral_fairseq.functional.precision import at_least_float32
from spectral_fairseq.functional.token_measures import TokenMeasures


class _BlockwiseLogProbs(torch.autograd.Function):
    """log p of the targets, their entropy and whether they are right, by blocks.

    The gradients of table and bias are known in the backward pass alone, which computes the scores
    of each block again. Where both are frozen, as under LoRA, the forward pass keeps the gradient
    of each log p for its own context, and the backward pass multiplies it by the one from above.
    """

    @staticmethod
    def forward(
        ctx: Any,
        contexts: Tensor,
        targets: Tensor,
        matrix: Tensor,
        bias: Optional[Tensor],
        softcap: Optional[float],
        block_elements: Optional[int],
    ) -> Tuple[Tensor, Tensor, Tensor]:
        ctx.dtype = product_dtype(contexts, matrix, bounded=False)
        ctx.options = {"softcap": softcap, "block_elements": block_elements}
        dtype = at_least_float32(ctx.dtype)
        ctx.frozen = not (ctx.needs_input_grad[2] or ctx.needs_input_grad[3])
        needed = (ctx.frozen and ctx.needs_input_grad[0], False, False)
        log_probs, entropy, right = (
            contexts.new_zeros(contexts.size(0), dtype=dtype) for _ in range(3)
        )
        with torch.autocast(contexts.device.type, enabled=False):
            sums = GradientSums(contexts, matrix, bias, dtype, needed)
            softmaxes = BlockSoftmaxes(
                contexts, targets, matrix, bias, ctx.dtype, measures=True, **ctx.options
            )
            for part, size in softmaxes.parts():
                block = softmaxes.block(part, size)
                assert block.right is not None and block.entropy is not None
                log_probs[part] = (block.target_scores - block.log_z)[: block.real]
                right[part] = block.right[: block.real].to(dtype)
                entropy[part] = block.entropy[: block.real]
                if sums.contexts is not None:
                    _add_gradients(softmaxes, sums, block, log_probs.new_ones(block.real))
                del block  # its scores, before those of the next block are computed
        if ctx.frozen:
            sums.save(ctx)
        else:
            ctx.save_for_backward(contexts, targets, matrix, bias)
        ctx.mark_non_differentiable(entropy, right)
        return log_probs, entropy, right

    @staticmethod
    @differentiable_once("blockwise_log_probs")
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Tuple[Optional[Tensor], ...]:
        if ctx.frozen:
            of_contexts = scaled_gradients(ctx, grad.unsqueeze(1))[0]
            return of_contexts, None, None, None, None, None
        contexts, targets, matrix, bias = ctx.saved_tensors
        dtype = at_least_float32(ctx.dtype)
        needed = tuple(ctx.needs_input_grad[i] for i in (0, 2, 3))
        with torch.autocast(contexts.device.type, enabled=False):
            sums = GradientSums(contexts, matrix, bias, dtype, needed)
            softmaxes = BlockSoftmaxes(contexts, targets, matrix, bias, ctx.dtype, **ctx.options)
            for part, size in softmaxes.parts():
                from_above = grad[part].to(dtype)
                _add_gradients(softmaxes, sums, softmaxes.block(part, size), from_above)
        of_contexts, of_matrix, of_bias = sums.results()
        return of_contexts, None, of_matrix, of_bias, None, None


def _add_gradients(
    softmaxes: BlockSoftmaxes, sums: GradientSums, block: BlockSoftmax, from_above: Tensor
) -> None:
    """Add the gradients of a block: d log p_y / d s = [v = y] - p, times those from above."""
    weights = -padded(from_above, len(block.rows))
    softmaxes.add_gradients(sums, block, weights, weights)


@outside_graphs
def blockwise_log_probs(
    contexts: Tensor,
    targets: Tensor,
    matrix: Tensor,
    bias: Optional[Tensor] = None,
    *,
    softcap: Optional[float] = None,
    ignore_index: Optional[int] = None,
    block_elements: Optional[int] = None,
) -> TokenMeasures:
    """Return log p of each target under softmax(W h + b), for losses that are functions of it.

    It has a gradient, for which the backward pass computes the scores of each block again: four
    products where :func:`~.softmax_loss.blockwise_cross_entropy` has three. Where table and bias
    are frozen, each has two.

    Args:
        contexts: h, shape (T, d).
        targets: shape (T,).
        matrix: W, shape (N, d).
        bias: b, shape (N,).
        softcap: c of scores c tanh((W h + b) / c), or ``None``.
        ignore_index: target whose tokens have zero everywhere.
        block_elements: as for :func:`~.softmax_loss.blockwise_cross_entropy`.

    Raises:
        ConfigurationError: shapes that do not fit together, or c outside its range.
    """
    check_loss_shapes(contexts, targets, matrix, bias)
    check_range("`softcap`", softcap, above=0, optional=True)
    kept, shape = kept_rows(ignore_index, targets), targets.shape
    targets, contexts = at_rows(kept, targets, contexts)
    contexts, matrix = aligned(contexts, matrix)
    contexts, matrix, bias = detached_without_grad(contexts, matrix, bias)
    options = (softcap, block_elements)
    found = _BlockwiseLogProbs.apply(contexts, targets, matrix, bias, *options)
    return TokenMeasures.at(kept, shape, *found)
