r"""Cross entropy of two passes over the same tokens, and how far their distributions differ.

With p_1 and p_2 the softmax of W h_1 + b and W h_2 + b, L_1 and L_2 their label-smoothed cross
entropies, and KL(p||q) = \sum_v p_v log(p_v / q_v), the loss of a token is

    (L_1 + L_2) / 2 + weight (KL(p_1||p_2) + KL(p_2||p_1)) / 2.

With a weight of alpha / 2 it is half of the objective of R-Drop: Liang et al., NeurIPS 2021,
https://arxiv.org/abs/2106.14448. Both sides have gradients. The naive form is
``tests/reference/losses.py``.

Flags: ``--rdrop-weight`` 0.
In order: ``plugin/likelihood_consistency.py: twice``, ``consistency_cross_entropy``.

Note [Gradients of a divergence]
--------------------------------
With r = log p_1 - log p_2, and both divergences weighted by f,

    d / d s_1 = p_1 (f (r - KL(p_1||p_2)) + f) - f p_2
    d / d s_2 = p_2 (f (-r - KL(p_2||p_1)) + f) - f p_1,

to which the cross entropy adds a multiple of p, a constant and an entry at the target. A block of
tokens therefore needs one product for its scores and two for its gradients, as the cross entropy
does alone.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import check_shape
from spectral_fairseq.functional.autograd import differentiable_once, outside_graphs
from spectral_fairseq.functional.blocks import (
    BlockScores,
    aligned,
    at_rows,
    check_loss_shapes,
    detached_without_grad,
    filled,
    kept_rows,
    product_dtype,
    smoothing_weights,
    token_blocks,
    tokens_per_block,
)
from spectral_fairseq.functional.gradient_sums import GradientSums, scaled_gradients
from spectral_fairseq.functional.precision import at_least_float32


class ConsistencyLoss(NamedTuple):
    """The parts of the loss; see the module.

    Attributes:
        loss: what is differentiated.
        likelihood: its first part, the label-smoothed cross entropy.
        nll: the same without label smoothing.
        divergence: the factor of the weight.
    """

    loss: Tensor
    likelihood: Tensor
    nll: Tensor
    divergence: Tensor


SHARE = 0.5  # of either pass in the loss


def _never_predicted(bias: Optional[Tensor]) -> Optional[Tensor]:
    """Return the words whose bias is minus infinity, shape (m,), or ``None`` if there are none.

    Neither pass predicts them, and 0 log(0 / 0) is 0.
    """
    if bias is None:
        return None
    words = bias.eq(-math.inf).nonzero().squeeze(1)
    return words if words.numel() else None


class _ConsistencySums:
    """Losses and gradients of two passes, to which the blocks of a batch are added one by one.

    Args:
        contexts: h_1 and h_2, shape (T, 2, d).
        targets: y, shape (T,).
        matrix: W, shape (N, d).
        bias: b, shape (N,).
        weight: of the divergence.
        label_smoothing: eps.
        dtype: of the products.
        needed: which gradients of contexts, table and bias autograd asks for.
    """

    def __init__(
        self,
        contexts: Tensor,
        targets: Tensor,
        matrix: Tensor,
        bias: Optional[Tensor],
        weight: float,
        label_smoothing: float,
        *,
        dtype: torch.dtype,
        needed: Tuple[bool, bool, bool],
    ) -> None:
        self.contexts, self.targets, self.weight = contexts, targets, weight
        self.vocabulary = matrix.size(0)
        self.target_weight, self.uniform = smoothing_weights(label_smoothing, self.vocabulary)
        self.block_scores = BlockScores(matrix, bias, dtype)
        self.never = _never_predicted(self.block_scores.bias)
        sum_dtype = at_least_float32(dtype)
        self.likelihood, self.nll, self.divergence = (
            contexts.new_zeros((), dtype=sum_dtype) for _ in range(3)
        )
        self.needed = any(needed)
        self.gradients = GradientSums(contexts.flatten(0, 1), matrix, bias, sum_dtype, needed)

    def add(self, part: slice, size: int) -> None:
        """Add the tokens in ``part``, in a block of ``size`` rows for either pass."""
        real = part.stop - part.start  # the rows behind these only fill the block up
        rows = self.block_scores.rows(self.contexts[part], size).flatten(0, 1)  # [2b, d]
        target = filled(self.targets[part], size).view(-1, 1, 1).expand(-1, 2, 1)  # [b, 2, 1]
        log_p = torch.log_softmax(self.block_scores(rows), -1).view(size, 2, -1)  # [b, 2, N]
        p = log_p.exp()
        log_ratio = log_p[:, 0] - log_p[:, 1]  # [b, N]
        if self.never is not None:
            log_ratio[:, self.never] = 0.0
        kl = torch.einsum("bkn,bn->bk", p, log_ratio)
        kl[:, 1].neg_()  # [b, 2], KL(p_1||p_2) and KL(p_2||p_1)
        hits = log_p.gather(2, target).squeeze(2)[:real].sum(0)  # [2]
        totals = log_p[:real].sum((0, 2)) if self.uniform else torch.zeros_like(hits)
        for k in (0, 1):
            self.nll -= SHARE * hits[k]
            self.likelihood -= SHARE * (self.target_weight * hits[k] + self.uniform * totals[k])
            self.divergence += SHARE * kl[:real, k].sum()
        if not self.needed:
            return
        gradient = log_p  # overwritten; see Note [Gradients of a divergence]
        pull = SHARE * self.weight
        factor = SHARE * (self.target_weight + self.vocabulary * self.uniform)
        for k, sign in ((0, 1.0), (1, -1.0)):
            own_gradient = torch.mul(log_ratio, sign * pull, out=gradient[:, k])
            own_gradient += (pull + factor - pull * kl[:, k]).unsqueeze(1)
            own_gradient *= p[:, k]
            own_gradient.sub_(p[:, 1 - k], alpha=pull)
            own_gradient -= SHARE * self.uniform
        hit = gradient.new_full((size, 2, 1), -SHARE * self.target_weight)
        gradient.scatter_add_(2, target, hit)
        gradient[real:] = 0
        place = slice(2 * part.start, 2 * part.stop)
        self.gradients.add_block(place, rows, gradient.flatten(0, 1), self.block_scores.table)


class _ConsistencyCrossEntropy(torch.autograd.Function):
    """The sums of :class:`ConsistencyLoss`, with gradients of the first one only.

    See ``gradient_sums.py``, Note [Gradients in the forward pass].
    """

    @staticmethod
    def forward(
        ctx: Any,
        contexts: Tensor,
        targets: Tensor,
        matrix: Tensor,
        bias: Optional[Tensor],
        weight: float,
        label_smoothing: float,
        block_elements: Optional[int],
    ) -> Tuple[Tensor, ...]:
        dtype = product_dtype(contexts, matrix, bounded=False)
        needed = (ctx.needs_input_grad[0], ctx.needs_input_grad[2], ctx.needs_input_grad[3])
        block = tokens_per_block(matrix, block_elements, softmaxes=2)
        inputs = (contexts, targets, matrix, bias)
        with torch.autocast(contexts.device.type, enabled=False):
            sums = _ConsistencySums(*inputs, weight, label_smoothing, dtype=dtype, needed=needed)
            for part, size in token_blocks(len(targets), block):
                sums.add(part, size)
        sums.gradients.save(ctx)
        ctx.shape = contexts.shape
        others = (sums.likelihood, sums.nll, sums.divergence)
        ctx.mark_non_differentiable(*others)
        return (sums.likelihood + weight * sums.divergence, *others)

    @staticmethod
    @differentiable_once("consistency_cross_entropy")
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Tuple[Optional[Tensor], ...]:
        contexts, matrix, bias = scaled_gradients(ctx, grad)
        if contexts is not None:
            contexts = contexts.view(ctx.shape)
        return contexts, None, matrix, bias, None, None, None


@outside_graphs
def consistency_cross_entropy(
    contexts: Tensor,
    targets: Tensor,
    matrix: Tensor,
    bias: Optional[Tensor] = None,
    *,
    weight: float,
    label_smoothing: float = 0.0,
    ignore_index: Optional[int] = None,
    block_elements: Optional[int] = None,
) -> ConsistencyLoss:
    """Return the loss of two passes, summed over tokens, from blocks of scores.

    Args:
        contexts: h_1 and h_2 of each token, shape (T, 2, d).
        targets: shape (T,).
        matrix: W, shape (N, d).
        bias: b, shape (N,).
        weight: of the divergence.
        label_smoothing: eps in [0, 1).
        ignore_index: target whose tokens contribute zero.
        block_elements: number of scores held at a time; ``None`` is
            ``blocks.elements_for`` the device.

    Returns:
        Scalars in float32 (float64 for float64 input), in nats. Only ``loss`` has a gradient, and
        only a first one.

    Raises:
        ConfigurationError: shapes that do not fit together, or eps outside its range.
    """
    check_loss_shapes(contexts, targets, matrix, bias)
    two = (contexts.size(0), 2, contexts.size(-1))
    check_shape("`contexts`", contexts, two, "Stack the hidden states of the two passes.")
    targets, contexts = at_rows(kept_rows(ignore_index, targets), targets, contexts)
    contexts, matrix = aligned(contexts, matrix)
    contexts, matrix, bias = detached_without_grad(contexts, matrix, bias)
    return ConsistencyLoss(
        *_ConsistencyCrossEntropy.apply(
            contexts, targets, matrix, bias, weight, label_smoothing, block_elements
        )
    )


def dense_consistency(
    log_probabilities: Tensor,
    targets: Tensor,
    *,
    weight: float,
    label_smoothing: float = 0.0,
    ignore_index: Optional[int] = None,
) -> ConsistencyLoss:
    """Return the loss of two passes for every token, for distributions of any kind.

    Args:
        log_probabilities: log p_1 and log p_2, shape (T, 2, N).
        targets: shape (T,).
        weight: of the divergence.
        label_smoothing: eps in [0, 1).
        ignore_index: target whose tokens contribute zero.

    Returns:
        Tensors of shape (T,), all differentiable.

    Raises:
        ConfigurationError: shapes that do not fit together, or eps outside its range.
    """
    two = (len(log_probabilities), 2, log_probabilities.size(-1))
    check_shape("`log_probabilities`", log_probabilities, two, "Stack those of the two passes.")
    check_shape("`targets`", targets, two[:1], "Give one for each token.")
    target_weight, uniform = smoothing_weights(label_smoothing, log_probabilities.size(-1))
    ignored = None if ignore_index is None else targets.eq(ignore_index)
    # What is ignored need not be a word.
    words = targets if ignored is None else targets.masked_fill(ignored, 0)
    index = words.view(-1, 1, 1).expand(-1, 2, 1)
    nlls = -log_probabilities.gather(2, index).squeeze(2)  # [T, 2]
    likelihoods = target_weight * nlls
    if uniform:
        likelihoods = likelihoods - uniform * log_probabilities.sum(-1)
    first, second = log_probabilities.unbind(1)  # [T, N] each
    # A word that neither pass predicts adds nothing, as 0 log(0 / 0) is 0.
    neither = first.eq(-math.inf) & second.eq(-math.inf)
    ratio = (first - second).masked_fill(neither, 0.0)
    kl = torch.stack([(first.exp() * ratio).sum(-1), -(second.exp() * ratio).sum(-1)], 1)  # [T, 2]
    parts = [(SHARE * each).sum(1) for each in (likelihoods, nlls, kl)]
    if ignored is not None:
        parts = [each.masked_fill(ignored, 0.0) for each in parts]
    likelihood, nll, divergence = parts
    return ConsistencyLoss(likelihood + weight * divergence, likelihood, nll, divergence)
