"""The sigsoftmax, p_v proportional to exp(z_v) sigmoid(z_v), and its cross entropy in blocks.

Kanai, Fujiwara, Yamanaka, Adachi: "Sigsoftmax: Reanalysis of the Softmax Bottleneck", NeurIPS 2018,
https://arxiv.org/abs/1805.10829, equation 11. It is the softmax of

    s = z + log sigmoid(z),    z = W h + b

and because s is not linear in h, the rank of the matrix of log-probabilities is not bounded by d
as that of a softmax is. It has no parameters of its own.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spectral_fairseq.functional.losses.block_scores import (
    accumulation_dtype,
    check_sizes,
    product_dtype,
)
from spectral_fairseq.functional.losses.blockwise import smoothing_weights
from spectral_fairseq.functional.losses.ignored_targets import without_ignored
from spectral_fairseq.functional.losses.token_blocks import (
    filled,
    padded,
    token_blocks,
    tokens_per_block,
)


def sigsoftmax_scores(logits: Tensor) -> Tensor:
    """s = z + log sigmoid(z) of ``logits``, of any shape; their softmax is the sigsoftmax of z."""
    return logits + F.logsigmoid(logits)


def sigsoftmax_cross_entropy(
    contexts: Tensor,
    targets: Tensor,
    matrix: Tensor,
    bias: Optional[Tensor] = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: Optional[int] = None,
    block_elements: Optional[int] = None,
) -> Tuple[Tensor, Tensor]:
    """The label-smoothed cross entropy of the sigsoftmax of W h + b, summed over tokens.

    The scores of a block are computed again in the backward pass, so that no tokens x N scores are
    held.

    Args:
        contexts: h, shape (T, d).
        targets: shape (T,).
        matrix: W, shape (N, d).
        bias: b, shape (N,).
        label_smoothing: eps in [0, 1), spread over the other N - 1 words.
        ignore_index: target whose tokens contribute zero.
        block_elements: number of scores held at a time; ``None`` is
            ``token_blocks.elements_for`` the device.

    Returns:
        loss_sum and nll_sum, scalars in float32 (float64 for float64 input), in nats. Only
        loss_sum has a gradient.

    Raises:
        ConfigurationError: shapes that do not fit together, or eps outside its range.
    """
    check_sizes(contexts, targets, matrix, bias)
    targets, contexts = without_ignored(ignore_index, targets, contexts)
    target_weight, uniform = smoothing_weights(label_smoothing, matrix.size(0))
    dtype = product_dtype(contexts, matrix, bounded=False)
    sum_dtype = accumulation_dtype(dtype)
    table = matrix.to(dtype)

    def block(rows: Tensor, targets: Tensor, counted: Tensor) -> Tuple[Tensor, Tensor]:
        logits = F.linear(rows.to(dtype), table).to(sum_dtype)  # [b, N]
        if bias is not None:
            logits = logits + bias.to(sum_dtype)
        log_p = torch.log_softmax(sigsoftmax_scores(logits), -1)
        filler = counted.eq(0)  # 0 times an infinite loss is no number

        def summed(each: Tensor) -> Tensor:
            return counted @ each.masked_fill(filler, 0.0)

        nll = -summed(log_p.gather(1, targets.unsqueeze(1)).squeeze(1))
        if not uniform:
            return nll, nll.detach()
        return target_weight * nll - uniform * summed(log_p.sum(1)), nll.detach()

    # Sums of nothing, which connect a batch of padding to the model.
    given = [contexts, matrix] if bias is None else [contexts, matrix, bias]
    loss_sum = torch.stack([one[:0].sum().to(sum_dtype) for one in given]).sum()
    nll_sum = torch.zeros_like(loss_sum.detach())
    with torch.autocast(contexts.device.type, enabled=False):
        size = tokens_per_block(matrix.size(0), contexts.device, block_elements)
        for part, rows in token_blocks(contexts.size(0), size):
            counted = padded(contexts.new_ones(part.stop - part.start, dtype=sum_dtype), rows)
            loss, nll = checkpoint(
                block,
                filled(contexts[part], rows),
                filled(targets[part], rows),
                counted,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            loss_sum, nll_sum = loss_sum + loss, nll_sum + nll
    return loss_sum, nll_sum
