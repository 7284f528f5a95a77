"""Cross entropy over a large vocabulary, computed block by block without tokens x N scores.

With scores s = W h + b, p = softmax(s) and label smoothing eps over N words,

    loss = (1 - eps - eps_i) (-log p_y) + eps_i sum_v (-log p_v),    eps_i = eps / (N - 1),

which is the loss of fairseq's ``label_smoothed_cross_entropy``; label smoothing is that of
Szegedy et al., CVPR 2016, https://arxiv.org/abs/1512.00567. The naive form is
``tests/reference/losses.py``.

The z-loss and the soft cap are two ways to keep the scores of a softmax small. With scores x, their
normaliser log Z = logsumexp(x), and a target y, a token costs

    -log p_y + lambda (log Z)^2,        gradient for x:  (1 + 2 lambda log Z) p - y

with the z-loss of Chowdhery et al., "PaLM", 2022, https://arxiv.org/abs/2204.02311, section 5,
whose lambda is 1e-4. With the soft cap c of Gemma 2, https://arxiv.org/abs/2408.00118, section 2,
whose c is 30, the scores are

    s = c tanh(x / c),        ds/dx = 1 - (s / c)^2.

The z-loss changes the training alone. A soft cap is a part of the model, which has other
probabilities without it.

Flags: ``--loss-form`` auto, ``--adversarial-epsilon`` 0, ``--z-loss`` 0, ``--logit-softcap``.
In order: ``plugin/likelihood.py: form_for``, ``heads/head.py: Head.loss``,
    ``adversarial_margin``, ``blockwise_cross_entropy``, ``softcap_``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import check_range
from spectral_fairseq.functional.autograd import differentiable_once, outside_graphs
from spectral_fairseq.functional.blocks import (
    BlockScores,
    GradientSums,
    accumulation_dtype,
    aligned,
    check_loss_shapes,
    detached_without_grad,
    filled,
    padded,
    product_dtype,
    scaled_gradients,
    smoothing_weights,
    softmax_and_targets_,
    token_blocks,
    tokens_per_block,
    without_ignored,
)
from spectral_fairseq.functional.precision import HALVES
from spectral_fairseq.functional.row_norms import row_norms


def softcapped(scores: Tensor, softcap: float) -> Tensor:
    """Return c tanh(x / c) of scores x of any shape."""
    return softcap * torch.tanh(scores / softcap)


def softcap_(scores: Tensor, softcap: float) -> Tensor:
    """Overwrite scores x, of any shape, by s = c tanh(x / c), and return ds/dx of that shape."""
    scores.div_(softcap).tanh_()
    slope = scores.square().neg_().add_(1.0)
    scores.mul_(softcap)
    return slope


class Losses(NamedTuple):
    """Losses summed over tokens, in nats, float32 (float64 for float64 input).

    Attributes:
        loss: label-smoothed cross entropy, of the scores with their margin, and the z-loss; the
            only one with a gradient.
        plain_loss: label-smoothed cross entropy without margin and z-loss, for logs.
        nll: the same without label smoothing.
        squares: (log Z)^2; 0 without the z-loss.
    """

    loss: Tensor
    plain_loss: Tensor
    nll: Tensor
    squares: Tensor


# The adversarial softmax: each target word is scored with the worst vector near its own.
#
# Wang, Gong, Liu: "Improving Neural Language Modeling via Adversarial Training", ICML 2019,
# https://proceedings.mlr.press/v97/wang19f.html. The inner problem has a closed form,
#
#     min over ||delta|| <= eps ||w_y|| of (w_y + delta)'h  =  w_y'h - eps ||w_y|| ||h||
#
# so the target's logit loses a margin eps ||w_y|| ||h||, in training only; the other logits keep
# their values. In a mixture of softmaxes each expert has a target's logit w_y'h_k of its own, which
# loses eps ||w_y|| ||h_k||.
#
# Note [Gradient of the margin]
# -----------------------------
# The margin is differentiated as a function of both h and w_y: the objective is the minimum itself,
# whose radius eps ||w_y|| depends on w_y. The gradient for h is -eps ||w_y|| h/||h||, the same as
# with a constant worst delta. For w_y the authors' public implementation differs in two ways: it
# holds the radius constant, which leaves out -eps ||h|| w_y/||w_y||, and it perturbs only targets
# whose cosine with h is positive. Detach ``target_norms`` to hold the radius constant.


def adversarial_margin(
    features: Tensor,
    target_norms: Tensor,
    targets: Tensor,
    epsilon: float,
    padding_idx: Optional[int] = None,
) -> Tensor:
    """Return the margin eps ||w_y|| ||h||, zero where the target is padding.

    Args:
        features: h, shape (*, d), the input of the output product.
        target_norms: ||w_y|| of each target's vector, shape (*): the norms of the gathered rows,
            so that the cost does not depend on the size of the table. For the contexts of a
            mixture, features of shape (*, K, d), the shape is (*, 1), and so is that of targets.
        targets: y, shape (*).
        epsilon: radius of the perturbation as a share of ||w_y||, at least 0.
        padding_idx: target that marks padding.

    Returns:
        Shape (*), float32 or wider.

    Raises:
        ConfigurationError: epsilon is negative, infinite or not a number.
    """
    check_range("`epsilon`", epsilon, at_least=0)
    if features.dtype in HALVES:
        features = features.float()
    margin = epsilon * target_norms.to(features.dtype) * row_norms(features)
    return margin if padding_idx is None else margin.masked_fill(targets.eq(padding_idx), 0.0)


def adversarial_logits(
    logits: Tensor, targets: Tensor, margin: Tensor, inplace: bool = False
) -> Tensor:
    """Return the logits with their target entries lowered by ``margin``.

    Any loss of these logits, also with label smoothing, is that of the perturbed output layer.

    Args:
        logits: shape (*, N).
        targets: shape (*), each from 0 to N - 1, also those that are padding.
        margin: from :func:`adversarial_margin`, shape (*).
        inplace: write into ``logits`` instead of a copy; for the result of an output product that
            nothing else reads.

    Returns:
        Shape (*, N), in the dtype of ``logits``.
    """
    index = targets.unsqueeze(-1)  # [*, 1]
    change = -margin.unsqueeze(-1).to(logits.dtype)  # [*, 1]
    if inplace:
        return logits.scatter_add_(-1, index, change)
    return logits.scatter_add(-1, index, change)


@torch.no_grad()
def unperturbed_nll(nll: Tensor, margin: Tensor) -> Tensor:
    """Return the negative log-likelihood without the margin, for logs, at a cost independent of N.

    Raising one logit by m changes the normaliser by the factor 1 - p + p e^m, where p = e^-nll
    is the target's probability.

    Args:
        nll: -log p of the targets under :func:`adversarial_logits`, shape (*).
        margin: m, shape (*).

    Returns:
        -log p of the targets under the unperturbed logits, shape (*), without a gradient.
    """
    others = torch.log1p(-torch.exp(-nll))  # log(1 - p), -inf where p is 1
    return torch.logaddexp(others, margin - nll) + nll - margin


@torch.no_grad()
def unperturbed_loss(
    loss: Tensor, nll: Tensor, margin: Tensor, smoothing: Tuple[float, float], vocabulary: int
) -> Tuple[Tensor, Tensor]:
    """Return the label-smoothed loss and the NLL without the margin, as :func:`unperturbed_nll`.

    With the target's logit raised again by its margin m every log-probability falls by
    c = nll_plain - nll + m, and the target's rises by m.

    Args:
        loss: label-smoothed loss of the targets under :func:`adversarial_logits`, shape (*).
        nll: -log p of the targets under the same logits, shape (*).
        margin: m, shape (*).
        smoothing: weights of the target's -log p and of every word's, from
            :func:`~.blocks.smoothing_weights`.
        vocabulary: N.

    Returns:
        Two tensors of shape (*), without a gradient.
    """
    target_weight, uniform = smoothing
    plain = unperturbed_nll(nll, margin)
    fall = plain - nll + margin
    change = target_weight * (plain - nll) + uniform * (vocabulary * fall - margin)
    # The loss of a target that has no probability is infinite, with and without the margin.
    return loss + change.masked_fill(nll.isinf(), 0.0), plain


class _BlockwiseCrossEntropy(torch.autograd.Function):
    """(loss_sum, plain_loss_sum, plain_nll_sum, square_sum), with gradients of loss_sum only.

    The second and the third are those of the scores without a margin and without the z-loss; the
    last one is the sum of (log Z)^2. See ``blocks.py``, Note [Gradients in the forward pass].
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
        z_loss: float,
        softcap: Optional[float],
    ) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens, vocabulary = contexts.size(0), matrix.size(0)
        target_weight, uniform = smoothing_weights(label_smoothing, vocabulary)
        # With the z-loss the gradient of a score may be larger than 1.
        dtype = product_dtype(contexts, matrix, bounded=not z_loss)
        sum_dtype = accumulation_dtype(dtype)
        needed = tuple(ctx.needs_input_grad[i] for i in (0, 2, 3))
        with torch.autocast(contexts.device.type, enabled=False):
            block_scores = BlockScores(matrix, bias, dtype)
            linear = softcap is None
            word_sum = matrix.sum(0, dtype=sum_dtype) if uniform and linear else None  # [d]
            bias_sum = 0.0 if block_scores.bias is None else block_scores.bias.sum()
            loss_sum, plain_loss_sum, plain_nll_sum, square_sum = (
                contexts.new_zeros((), dtype=sum_dtype) for _ in range(4)
            )
            margin_gradient = None if margin is None else margin.new_zeros(tokens, dtype=sum_dtype)
            sums = GradientSums(contexts, matrix, bias, sum_dtype, needed)
            narrow = linear and block_scores.overwrites_products
            block = tokens_per_block(matrix, block_elements, half_precision=narrow)
            for part, size in token_blocks(tokens, block):
                rows = block_scores.rows(contexts[part], size)  # [b, d]
                block_targets = filled(targets[part], size)  # [b]
                # 1 for a token, 0 for a row that only fills the block up.
                real = part.stop - part.start
                counted = padded(rows.new_ones(real, dtype=sum_dtype), size)  # [b]
                slope = score_sum = block_margin = None
                if margin is not None:
                    block_margin = filled(margin[part].to(sum_dtype), size)  # [b]
                if softcap is None:
                    scores, log_z, target_score = block_scores.softmax(
                        rows, block_targets, block_margin
                    )
                else:
                    scores = block_scores(rows)  # [b, N]
                    slope = softcap_(scores, softcap)
                    score_sum = scores.sum(1) if uniform else None
                    log_z, target_score = softmax_and_targets_(scores, block_targets, block_margin)
                nll = plain_nll = log_z - target_score
                loss = target_weight * nll
                if word_sum is not None:
                    # sum_v -log p_v = N log Z - sum_v s_v, without a pass over the scores.
                    score_sum = rows.to(sum_dtype) @ word_sum + bias_sum
                    if block_margin is not None:
                        score_sum -= block_margin
                if score_sum is not None:
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
                # d loss / d s = (target_weight + N uniform + 2 lambda log Z) p
                #                - target_weight [v = y] - uniform,
                # whose last term is the same for all tokens and is added after the loop.
                weights = (target_weight + vocabulary * uniform) * counted
                if z_loss:
                    log_z[real:] = 0
                    square_sum += log_z @ log_z
                    weights = weights + 2 * z_loss * log_z
                hits = target_weight * counted
                if slope is None:
                    sums.add_block(
                        part, rows, scores, block_scores.table, block_targets, weights, hits
                    )
                    continue
                scores.mul_(weights.unsqueeze(1)).sub_(uniform * counted.unsqueeze(1))
                scores.scatter_add_(1, block_targets.unsqueeze(1), -hits.unsqueeze(1))
                sums.add_block(part, rows, scores.mul_(slope), block_scores.table)
            if z_loss:
                loss_sum = loss_sum + z_loss * square_sum
            if word_sum is not None:
                if sums.contexts is not None:
                    sums.contexts -= uniform * word_sum
                if sums.matrix is not None:
                    sums.matrix -= uniform * contexts.sum(0, dtype=sum_dtype)
                if sums.bias is not None:
                    sums.bias -= uniform * tokens
        sums.save(ctx, (margin_gradient, sum_dtype if margin is None else margin.dtype))
        ctx.mark_non_differentiable(plain_loss_sum, plain_nll_sum, square_sum)
        return loss_sum, plain_loss_sum, plain_nll_sum, square_sum

    @staticmethod
    @differentiable_once("blockwise_cross_entropy")
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Tuple[Optional[Tensor], ...]:
        contexts, matrix, bias, margin = scaled_gradients(ctx, grad)
        return contexts, None, matrix, bias, margin, None, None, None, None


@outside_graphs
def blockwise_cross_entropy(
    contexts: Tensor,
    targets: Tensor,
    matrix: Tensor,
    bias: Optional[Tensor] = None,
    *,
    margin: Optional[Tensor] = None,
    z_loss: float = 0.0,
    softcap: Optional[float] = None,
    label_smoothing: float = 0.0,
    ignore_index: Optional[int] = None,
    block_elements: Optional[int] = None,
) -> Losses:
    """Return the label-smoothed cross entropy of softmax(W h + b), summed over tokens.

    It equals ``tests/reference/losses.py: smoothed_nll(log_softmax(h W' + b))``, or that of
    :func:`adversarial_logits`, but its memory does not grow with tokens x N.

    Args:
        contexts: h, shape (T, d).
        targets: shape (T,).
        matrix: W, shape (N, d).
        bias: b, shape (N,).
        margin: what the target's score loses, eps ||w_y|| ||h|| from :func:`adversarial_margin`,
            shape (T,); it has a gradient.
        z_loss: lambda of the z-loss, with which (log Z)^2 is added to the loss.
        softcap: c of scores c tanh((W h + b) / c), or ``None``.
        label_smoothing: eps in [0, 1).
        ignore_index: target whose tokens contribute zero.
        block_elements: number of scores held at a time; ``None`` is
            ``blocks.elements_for`` the device.

    Returns:
        The losses, of which only the first has a gradient, and only a first one. The plain ones
        come at a cost independent of N.

    Raises:
        ConfigurationError: shapes that do not fit together, or eps, lambda or c outside its range.
    """
    check_loss_shapes(contexts, targets, matrix, bias)
    if z_loss:
        check_range("`z_loss`", z_loss, at_least=0)
    check_range("`softcap`", softcap, above=0, optional=True)
    targets, contexts, margin = without_ignored(ignore_index, targets, contexts, margin)
    contexts, matrix = aligned(contexts, matrix)
    contexts, matrix, bias, margin = detached_without_grad(contexts, matrix, bias, margin)
    options = (label_smoothing, block_elements, z_loss, softcap)
    return Losses(*_BlockwiseCrossEntropy.apply(contexts, targets, matrix, bias, margin, *options))
