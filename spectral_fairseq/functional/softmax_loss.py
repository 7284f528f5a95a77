"""Cross entropy over a large vocabulary, computed block by block without tokens x N scores.

With scores s = W h + b, p = softmax(s) and label smoothing eps over N words,

    loss = (1 - eps - eps_i) (-log p_y) + eps_i sum_v (-log p_v),    eps_i = eps / (N - 1),

which is the loss of fairseq's ``label_smoothed_cross_entropy``; label smoothing is that of
Szegedy et al., CVPR 2016, https://arxiv.org/abs/1512.00567. The naive form is
``tests/reference/losses.py``.

The z-loss of Chowdhery et al., "PaLM", 2022, https://arxiv.org/abs/2204.02311, section 5, whose
lambda is 1e-4, keeps the normaliser log Z = logsumexp(s) near 0. With it a token costs

    -log p_y + lambda (log Z)^2,        gradient for s:  (1 + 2 lambda log Z) p - [v = y].

It changes the training alone, while a soft cap (``softcap.py``) is a part of the model.

Flags: ``--loss-form`` auto, ``--z-loss`` 0.
In order: ``plugin/likelihood_choice.py: form_for``, ``heads/head.py: Head.loss``,
    ``blockwise_cross_entropy``, ``functional/block_softmaxes.py: BlockSoftmaxes``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError, check_range, check_shape
from spectral_fairseq.functional.adversarial_softmax import unperturbed_loss
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
    smoothing_weights,
)
from spectral_fairseq.functional.gradient_sums import GradientSums, scaled_gradients
from spectral_fairseq.functional.token_measures import TokenMeasures


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


class _Options(NamedTuple):
    """How :func:`blockwise_cross_entropy` weighs and cuts, and whether tokens are measured."""

    z_loss: float = 0.0
    softcap: Optional[float] = None
    label_smoothing: float = 0.0
    by_probability: bool = False
    block_elements: Optional[int] = None
    measures: bool = False


class _BatchLoss:
    """The losses of a batch and their gradients, to which its blocks are added one by one.

    In order: :meth:`add` of each block, then :meth:`finish`.

    Args:
        softmaxes: those of the batch.
        matrix: W, shape (N, d).
        bias: b, shape (N,), or ``None``.
        token_weights: shape (T,).
        options: as of :func:`blockwise_cross_entropy`.
        needed: which gradients of contexts, table and bias autograd asks for.
    """

    def __init__(
        self,
        softmaxes: BlockSoftmaxes,
        matrix: Tensor,
        bias: Optional[Tensor],
        token_weights: Optional[Tensor],
        options: _Options,
        needed: Tuple[bool, bool, bool],
    ) -> None:
        contexts = softmaxes.contexts
        self.softmaxes, self.contexts = softmaxes, contexts
        self.token_weights, self.options = token_weights, options
        self.tokens, self.vocabulary = contexts.size(0), matrix.size(0)
        self.target_weight, self.uniform = smoothing_weights(
            options.label_smoothing, self.vocabulary
        )
        self.weighted = token_weights is not None or options.by_probability
        self.dtype = softmaxes.dtype
        by_sums = self.uniform and options.softcap is None
        self.word_sum = matrix.sum(0, dtype=self.dtype) if by_sums else None  # [d]
        scores_bias = softmaxes.scores.bias
        self.bias_sum = 0.0 if scores_bias is None else scores_bias.sum()
        self.gradients = GradientSums(
            contexts, matrix, bias, self.dtype, needed, softmaxes.is_single
        )
        self.loss = contexts.new_zeros((), dtype=self.dtype)
        self.plain_loss, self.plain_nll = self.loss.clone(), self.loss.clone()
        self.squares = self.loss.clone()  # sum of (log Z)^2
        self.margin_gradient = None if softmaxes.margin is None else self._per_token(True)
        self.weights = contexts.new_ones(self.tokens if self.weighted else 0, dtype=self.dtype)
        self.log_probs = self._per_token(options.measures)
        self.entropy = self._per_token(options.measures)
        self.right = self._per_token(options.measures)

    def _per_token(self, wanted: bool) -> Tensor:
        return self.contexts.new_zeros(self.tokens if wanted else 0, dtype=self.dtype)

    def add(self, block: BlockSoftmax) -> None:
        """Add the losses of a block, and their gradients; its scores are overwritten."""
        nll = block.log_z - block.target_scores
        loss = self.target_weight * nll
        if self.uniform:
            # sum_v -log p_v = N log Z - sum_v s_v
            loss += self.uniform * (self.vocabulary * block.log_z - self._score_sum(block))
        plain_loss, plain_nll = self._without_margin(block, loss, nll)
        self._measure(block, plain_nll)
        counted = self._counted(block, plain_nll)  # [b]
        for each in (loss, plain_loss, plain_nll):
            each[block.real :] = 0  # 0 times an infinite loss is no number
        self.loss += counted @ loss
        self.plain_loss += plain_loss.sum() if self.weighted else counted @ plain_loss
        self.plain_nll += plain_nll.sum() if self.weighted else counted @ plain_nll
        self._add_gradients(block, counted, self._slope_of_log_z(block, counted))

    def _score_sum(self, block: BlockSoftmax) -> Tensor:
        """Return sum_v s_v, shape (b,); without a soft cap it takes no pass over the scores."""
        if self.word_sum is None:
            assert block.score_sum is not None
            score_sum = block.score_sum
        else:
            score_sum = block.rows.to(self.dtype) @ self.word_sum + self.bias_sum
        return score_sum if block.margin is None else score_sum - block.margin

    def _without_margin(
        self, block: BlockSoftmax, loss: Tensor, nll: Tensor
    ) -> Tuple[Tensor, Tensor]:
        """Return loss and NLL of the scores without their margin, and keep its gradient."""
        if block.margin is None or self.margin_gradient is None:
            return loss, nll
        hit_share = (self.target_weight + self.vocabulary * self.uniform) * torch.exp(-nll)
        from_margin = self.target_weight + self.uniform - hit_share  # -d loss / d s_y
        self.margin_gradient[block.part] = from_margin[: block.real]
        smoothing = (self.target_weight, self.uniform)
        return unperturbed_loss(loss, nll, block.margin, smoothing, self.vocabulary)

    def _measure(self, block: BlockSoftmax, plain_nll: Tensor) -> None:
        if block.right is None or block.entropy is None:
            return
        self.log_probs[block.part] = -plain_nll[: block.real]
        self.right[block.part] = block.right[: block.real].to(self.dtype)
        self.entropy[block.part] = block.entropy[: block.real]

    def _counted(self, block: BlockSoftmax, plain_nll: Tensor) -> Tensor:
        """Return the weight of each row, 1 without weights; 0 for those that only fill up.

        The weights of tokens are kept, and multiply the gradients of their margins.
        """
        part, size = block.part, len(block.rows)
        if not self.weighted:
            return padded(block.rows.new_ones(block.real, dtype=self.dtype), size)
        if self.token_weights is not None:
            self.weights[part] = self.token_weights[part].to(self.dtype)
        if self.options.by_probability:
            self.weights[part] *= torch.exp(-plain_nll[: block.real])
        if self.margin_gradient is not None:
            self.margin_gradient[part] *= self.weights[part]
        return padded(self.weights[part], size)

    def _slope_of_log_z(self, block: BlockSoftmax, counted: Tensor) -> Optional[Tensor]:
        """Add the z-loss, and return its derivative by log Z, shape (b,)."""
        if not self.options.z_loss:
            return None
        log_z = block.log_z
        log_z[block.real :] = 0
        self.squares += log_z @ log_z
        slope = 2 * self.options.z_loss * log_z
        if self.weighted:
            self.loss += self.options.z_loss * (counted @ log_z.square())
            slope = slope * counted
        if self.margin_gradient is not None:  # log Z falls with the target's score
            by_margin = slope * torch.exp(block.target_scores - log_z)
            self.margin_gradient[block.part] -= by_margin[: block.real]
        return slope

    def _add_gradients(
        self, block: BlockSoftmax, counted: Tensor, slope_of_log_z: Optional[Tensor]
    ) -> None:
        """Add the gradients of contexts, table and bias that follow from those of the scores.

        d loss / d s = (target_weight + N uniform + 2 lambda log Z) p - target_weight [v = y]
        - uniform, whose last term is the same for all tokens and is added at the end.
        """
        weights = (self.target_weight + self.vocabulary * self.uniform) * counted
        if slope_of_log_z is not None:
            weights = weights + slope_of_log_z
        hits = self.target_weight * counted
        uniform = self.uniform * counted if self.uniform else None
        self.softmaxes.add_gradients(self.gradients, block, weights, hits, uniform)

    def finish(self) -> None:
        """Add what is the same for all tokens, once the last block has been added."""
        if self.options.z_loss and not self.weighted:
            self.loss = self.loss + self.options.z_loss * self.squares
        if self.word_sum is None:
            return
        sums, weighted = self.gradients, self.weighted
        if sums.contexts is not None:
            share = self.weights.unsqueeze(1) * self.word_sum if weighted else self.word_sum
            sums.contexts -= self.uniform * share
        if sums.matrix is not None:
            wide = self.contexts.to(self.dtype) if weighted else self.contexts
            summed = self.weights @ wide if weighted else wide.sum(0, dtype=self.dtype)
            sums.matrix.add_to_all(-self.uniform * summed)
        if sums.bias is not None:
            sums.bias -= self.uniform * (self.weights.sum() if weighted else self.tokens)


class _BlockwiseCrossEntropy(torch.autograd.Function):
    """(loss_sum, plain_loss_sum, plain_nll_sum, square_sum), with gradients of loss_sum only.

    The second and the third are those of the scores without a margin, without the z-loss and
    without weights of tokens; the fourth is the sum of (log Z)^2. Behind them are the three of
    ``TokenMeasures``, empty unless they are asked for. See ``gradient_sums.py``, Note [Gradients
    in the forward pass].
    """

    @staticmethod
    def forward(
        ctx: Any,
        contexts: Tensor,
        targets: Tensor,
        matrix: Tensor,
        bias: Optional[Tensor],
        margin: Optional[Tensor],
        token_weights: Optional[Tensor],
        options: _Options,
    ) -> Tuple[Tensor, ...]:
        # With the z-loss or a weight the gradient of a score may be larger than 1. Autocast decides
        # the dtype of the products, so it is asked before it is switched off.
        bounded = not options.z_loss and token_weights is None
        dtype = product_dtype(contexts, matrix, bounded=bounded)
        needs = ctx.needs_input_grad
        with torch.autocast(contexts.device.type, enabled=False):
            softmaxes = BlockSoftmaxes(
                contexts,
                targets,
                matrix,
                bias,
                dtype,
                margin=margin,
                softcap=options.softcap,
                block_elements=options.block_elements,
                measures=options.measures,
                sums_scores=options.label_smoothing > 0,
            )
            needed = (needs[0], needs[2], needs[3])
            batch = _BatchLoss(softmaxes, matrix, bias, token_weights, options, needed)
            for part, size in softmaxes.parts():
                batch.add(softmaxes.block(part, size))
            batch.finish()
        batch.gradients.save(ctx, (batch.margin_gradient, margin))
        losses = (batch.plain_loss, batch.plain_nll, batch.squares)
        others = (*losses, batch.log_probs, batch.entropy, batch.right)
        ctx.mark_non_differentiable(*others)
        return (batch.loss, *others)

    @staticmethod
    @differentiable_once("blockwise_cross_entropy")
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Tuple[Optional[Tensor], ...]:
        contexts, matrix, bias, margin = scaled_gradients(ctx, grad)
        return (contexts, None, matrix, bias, margin, None, None)


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
    weights: Optional[Tensor] = None,
    by_probability: bool = False,
    ignore_index: Optional[int] = None,
    block_elements: Optional[int] = None,
) -> Losses:
    """Return the label-smoothed cross entropy of softmax(W h + b), summed over tokens.

    It equals ``tests/reference/losses.py: smoothed_nll(log_softmax(h W' + b))``, or that of
    :func:`~.adversarial_softmax.lower_targets_`, but its memory does not grow with tokens x N.

    Args:
        contexts: h, shape (T, d).
        targets: shape (T,).
        matrix: W, shape (N, d).
        bias: b, shape (N,).
        margin: what the target's score loses, eps ||w_y|| ||h|| from
            :func:`~.adversarial_softmax.adversarial_margin`, shape (T,); it has a gradient.
        z_loss: lambda of the z-loss, with which (log Z)^2 is added to the loss.
        softcap: c of scores c tanh((W h + b) / c), or ``None``.
        label_smoothing: eps in [0, 1).
        weights: by which the losses of tokens are multiplied, shape (T,), constants.
        by_probability: multiply them by p_y too, a constant of each token, as dynamic fine-tuning
            does (https://arxiv.org/abs/2508.05629).
        ignore_index: target whose tokens contribute zero.
        block_elements: number of scores held at a time; ``None`` is
            ``blocks.elements_for`` the device.

    Returns:
        The losses, of which only the first has a gradient, and only a first one. The plain ones
        come at a cost independent of N, and are of tokens without weights.

    Raises:
        ConfigurationError: shapes that do not fit together, eps, lambda or c outside its range, or
            weights that have a gradient.
    """
    options = _Options(z_loss, softcap, label_smoothing, by_probability, block_elements)
    given = (contexts, targets, matrix, bias, margin, weights)
    return Losses(*_cross_entropy(*given, kept_rows(ignore_index, targets), options)[:4])


@outside_graphs
def measured_cross_entropy(
    contexts: Tensor,
    targets: Tensor,
    matrix: Tensor,
    bias: Optional[Tensor] = None,
    *,
    weights: Optional[Tensor] = None,
    ignore_index: Optional[int] = None,
    **options: Any,
) -> Tuple[Losses, TokenMeasures]:
    """Return what :func:`blockwise_cross_entropy` does, and the measures of each token.

    They are by-products of the same pass, without a gradient. The arguments are the same, but for
    the margin: of an adversarial loss no token is measured.
    """
    given = (contexts, targets, matrix, bias, None, weights)
    kept = kept_rows(ignore_index, targets)
    sums = _cross_entropy(*given, kept, _Options(measures=True, **options))
    return Losses(*sums[:4]), TokenMeasures.at(kept, targets.shape, *sums[4:])


def _cross_entropy(
    contexts: Tensor,
    targets: Tensor,
    matrix: Tensor,
    bias: Optional[Tensor],
    margin: Optional[Tensor],
    weights: Optional[Tensor],
    kept: Optional[Tensor],
    options: _Options,
) -> Tuple[Tensor, ...]:
    check_loss_shapes(contexts, targets, matrix, bias)
    if options.z_loss:
        check_range("`z_loss`", options.z_loss, at_least=0)
    if options.softcap is not None:
        check_range("`softcap`", options.softcap, above=0)
    if margin is not None:
        check_shape("`margin`", margin, targets.shape, "Give one number for each target.")
    if weights is not None:
        check_token_weights(weights, targets)
    targets, contexts, margin, weights = at_rows(kept, targets, contexts, margin, weights)
    contexts, matrix = aligned(contexts, matrix)
    contexts, matrix, bias, margin = detached_without_grad(contexts, matrix, bias, margin)
    sums: Tuple[Tensor, ...] = _BlockwiseCrossEntropy.apply(
        contexts, targets, matrix, bias, margin, weights, options
    )
    return sums


def check_token_weights(weights: Tensor, targets: Tensor) -> None:
    """Refuse weights of tokens that the losses cannot take.

    Raises:
        ConfigurationError: of another shape than the targets, or with a gradient.
    """
    check_shape("`weights`", weights, targets.shape, "Give one number for each target.")
    if weights.requires_grad:
        raise ConfigurationError(
            "`weights` of tokens that are constants",
            "some with a gradient",
            "Detach them; a loss that is a function of log-probabilities takes these from "
            "blockwise_log_probs.",
        )
