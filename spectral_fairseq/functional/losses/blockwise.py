"""Cross entropy over a large vocabulary, computed block by block without tokens x N scores.

With scores s = W h + b, p = softmax(s) and label smoothing eps over N words,

    loss = (1 - eps - eps_i) (-log p_y) + eps_i sum_v (-log p_v),    eps_i = eps / (N - 1),

which is the loss of fairseq's ``label_smoothed_cross_entropy``; label smoothing is that of
Szegedy et al., CVPR 2016, https://arxiv.org/abs/1512.00567. The naive form is
``tests/reference/mixture.py``.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.losses.adversarial import (
    AdversarialLoss,
    adversarial_logits,
    unperturbed_loss,
)
from spectral_fairseq.functional.losses.block_scores import (
    BlockScores,
    accumulation_dtype,
    aligned,
    check_sizes,
    product_dtype,
    softmax_,
)
from spectral_fairseq.functional.losses.gradient_sums import (
    GradientSums,
    detached_without_grad,
    outside_graphs,
    scaled_gradients,
)
from spectral_fairseq.functional.losses.ignored_targets import without_ignored
from spectral_fairseq.functional.losses.token_blocks import (
    filled,
    padded,
    token_blocks,
    tokens_per_block,
)


def smoothing_weights(label_smoothing: float, vocabulary: int) -> Tuple[float, float]:
    """Return the weights of the target's -log p and of every word's, 1 - eps - eps_i and eps_i.

    Args:
        label_smoothing: eps.
        vocabulary: N.

    Raises:
        ConfigurationError: eps is outside [0, 1), or there are fewer than two words to smooth over.
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise ConfigurationError(
            "`label_smoothing` in [0, 1)", repr(label_smoothing), "Choose a value in that range."
        )
    if label_smoothing == 0.0:
        return 1.0, 0.0
    if vocabulary < 2:
        raise ConfigurationError(
            "a vocabulary of two words or more with `label_smoothing`",
            f"N = {vocabulary}",
            "Set `label_smoothing` to 0.",
        )
    uniform = label_smoothing / (vocabulary - 1)
    return 1.0 - label_smoothing - uniform, uniform


class _BlockwiseCrossEntropy(torch.autograd.Function):
    """(loss_sum, plain_loss_sum, plain_nll_sum), with gradients of loss_sum only.

    The last two are those of the scores without a margin. See ``gradient_sums.py``,
    Note [Gradients in the forward pass].
    """

    @staticmethod
    def forward(
        ctx: Any,
        contexts: Tensor,
        targets: Tensor,
        matrix: Tensor,
        bias: Optional[Tensor],
        margin: Optional[Tensor],
        label_smoothing: float,
        block_elements: Optional[int],
    ) -> Tuple[Tensor, Tensor, Tensor]:
        tokens, vocabulary = contexts.size(0), matrix.size(0)
        target_weight, uniform = smoothing_weights(label_smoothing, vocabulary)
        dtype = product_dtype(contexts, matrix)
        sum_dtype = accumulation_dtype(dtype)
        needed = tuple(ctx.needs_input_grad[i] for i in (0, 2, 3))
        with torch.autocast(contexts.device.type, enabled=False):
            block_scores = BlockScores(matrix, bias, dtype)
            word_sum = matrix.sum(0, dtype=sum_dtype) if uniform else None  # [d]
            bias_sum = 0.0 if block_scores.bias is None else block_scores.bias.sum()
            loss_sum, plain_loss_sum, plain_nll_sum = (
                contexts.new_zeros((), dtype=sum_dtype) for _ in range(3)
            )
            margin_gradient = None if margin is None else margin.new_zeros(tokens, dtype=sum_dtype)
            sums = GradientSums(contexts, matrix, bias, sum_dtype, needed)
            block = tokens_per_block(vocabulary, contexts.device, block_elements)
            for part, size in token_blocks(tokens, block):
                rows = block_scores.rows(contexts[part], size)  # [b, d]
                block_targets = filled(targets[part], size)  # [b]
                # 1 for a token, 0 for a row that only fills the block up.
                real = part.stop - part.start
                counted = padded(rows.new_ones(real, dtype=sum_dtype), size)  # [b]
                scores = block_scores(rows)  # [b, N]
                block_margin = None
                if margin is not None:
                    block_margin = filled(margin[part].to(sum_dtype), size)  # [b]
                    adversarial_logits(scores, block_targets, block_margin, inplace=True)
                target_score = scores.gather(1, block_targets.unsqueeze(1)).squeeze(1)  # [b]
                log_z = softmax_(scores)
                nll = plain_nll = log_z - target_score
                loss = target_weight * nll
                if word_sum is not None:
                    # sum_v -log p_v = N log Z - sum_v s_v, without a pass over the scores.
                    score_sum = rows.to(sum_dtype) @ word_sum + bias_sum
                    if block_margin is not None:
                        score_sum -= block_margin
                    loss += uniform * (vocabulary * log_z - score_sum)
                plain_loss = loss
                if block_margin is not None and margin_gradient is not None:
                    plain_loss, plain_nll = unperturbed_loss(
                        loss, nll, block_margin, (target_weight, uniform), vocabulary
                    )
                    hit_share = (target_weight + vocabulary * uniform) * torch.exp(-nll)
                    from_margin = target_weight + uniform - hit_share  # -d loss / d s_y
                    margin_gradient[part] = from_margin[:real]
                for each in (loss, plain_loss, plain_nll):
                    each[real:] = 0  # 0 times an infinite loss is no number
                loss_sum += counted @ loss
                plain_loss_sum += counted @ plain_loss
                plain_nll_sum += counted @ plain_nll
                # d loss / d s = (target_weight + N uniform) p - target_weight [v = y] - uniform,
                # whose last term is the same for all tokens and is added after the loop.
                sums.add_block(
                    part,
                    rows,
                    scores,
                    block_scores.table,
                    block_targets,
                    weights=(target_weight + vocabulary * uniform) * counted,
                    hits=target_weight * counted,
                )
            if word_sum is not None:
                if sums.contexts is not None:
                    sums.contexts -= uniform * word_sum
                if sums.matrix is not None:
                    sums.matrix -= uniform * contexts.sum(0, dtype=sum_dtype)
                if sums.bias is not None:
                    sums.bias -= uniform * tokens
        sums.save(ctx, (margin_gradient, sum_dtype if margin is None else margin.dtype))
        ctx.mark_non_differentiable(plain_loss_sum, plain_nll_sum)
        return loss_sum, plain_loss_sum, plain_nll_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Tuple[Optional[Tensor], ...]:
        contexts, matrix, bias, margin = scaled_gradients(ctx, grad)
        return contexts, None, matrix, bias, margin, None, None


def blockwise_cross_entropy(
    contexts: Tensor,
    targets: Tensor,
    matrix: Tensor,
    bias: Optional[Tensor] = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: Optional[int] = None,
    block_elements: Optional[int] = None,
) -> Tuple[Tensor, Tensor]:
    """Return the label-smoothed cross entropy of softmax(W h + b), summed over tokens.

    It equals ``tests/reference/mixture.py: smoothed_nll(log_softmax(h W' + b))``, but its memory
    does not grow with tokens x N.

    Args:
        contexts: h, shape (T, d).
        targets: shape (T,).
        matrix: W, shape (N, d).
        bias: b, shape (N,).
        label_smoothing: eps in [0, 1).
        ignore_index: target whose tokens contribute zero.
        block_elements: number of scores held at a time; ``None`` is
            ``token_blocks.elements_for`` the device.

    Returns:
        loss_sum and nll_sum, scalars in float32 (float64 for float64 input), in nats. Only
        loss_sum has a gradient, and only a first one.

    Raises:
        ConfigurationError: shapes that do not fit together, or eps outside its range.
    """
    inputs = (contexts, targets, matrix, bias)
    loss, _, nll = _summed_losses(inputs, None, label_smoothing, ignore_index, block_elements)
    return loss, nll


def adversarial_blockwise_cross_entropy(
    contexts: Tensor,
    targets: Tensor,
    matrix: Tensor,
    margin: Tensor,
    bias: Optional[Tensor] = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: Optional[int] = None,
    block_elements: Optional[int] = None,
) -> AdversarialLoss:
    """Return :func:`blockwise_cross_entropy` with the target's score lowered, and without.

    It equals ``tests/reference/mixture.py: smoothed_nll`` of the log-softmax of
    :func:`~.adversarial.adversarial_logits`.

    Args:
        contexts: h, shape (T, d).
        targets: shape (T,).
        matrix: W, shape (N, d).
        margin: eps ||w_y|| ||h|| from :func:`~.adversarial.adversarial_margin`, shape (T,); it has
            a gradient.
        bias: b, shape (N,).
        label_smoothing: eps in [0, 1).
        ignore_index: target whose tokens contribute zero.
        block_elements: as for :func:`blockwise_cross_entropy`.

    Returns:
        The loss, and the plain losses for logs, at a cost independent of N.

    Raises:
        ConfigurationError: shapes that do not fit together, or eps outside its range.
    """
    inputs = (contexts, targets, matrix, bias)
    return AdversarialLoss(
        *_summed_losses(inputs, margin, label_smoothing, ignore_index, block_elements)
    )


@outside_graphs
def _summed_losses(
    inputs: Tuple[Tensor, Tensor, Tensor, Optional[Tensor]],
    margin: Optional[Tensor],
    label_smoothing: float,
    ignore_index: Optional[int],
    block_elements: Optional[int],
) -> Tuple[Tensor, Tensor, Tensor]:
    """Check and apply :class:`_BlockwiseCrossEntropy`."""
    contexts, targets, matrix, bias = inputs
    check_sizes(contexts, targets, matrix, bias)
    targets, contexts, margin = without_ignored(ignore_index, targets, contexts, margin)
    contexts, matrix = aligned(contexts, matrix)
    contexts, matrix, bias, margin = detached_without_grad(contexts, matrix, bias, margin)
    return _BlockwiseCrossEntropy.apply(
        contexts, targets, matrix, bias, margin, label_smoothing, block_elements
    )
