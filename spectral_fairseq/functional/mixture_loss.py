"""Mixtures of softmaxes and of contexts over one output table.

Yang, Dai, Salakhutdinov, Cohen: "Breaking the Softmax Bottleneck: A High-Rank RNN Language
Model", ICLR 2018, https://openreview.net/forum?id=HkwZSG-CZ, sections 2.4 and 2.5. With contexts
h_k and a prior pi_k, k = 1..K,

    MoS:  P(v) = sum_k pi_k softmax(W h_k + b)_v            MoC:  P = softmax(W sum_k pi_k h_k + b)

Everything stays in log space: log P(v) = logsumexp_k(log pi_k + log softmax(W h_k + b)_v).

In order: ``heads/mixture.py: MixtureHead.checked_loss``, ``mixture_cross_entropy`` in training,
    ``log_mixture`` in evaluation and search.

Note [Gradients of a mixture]
-----------------------------
Let p_k be the softmax of expert k, P the mixture, and g_v the derivative of the loss by log P(v).
With the posterior of an expert given a word, rho_kv = pi_k p_kv / P(v), and R_k = sum_v g_v rho_kv,

    d loss / d log pi_k = R_k,        d loss / d s_kv = g_v rho_kv - R_k p_kv.

For the plain negative log-likelihood g is -1 at the target and 0 elsewhere, so that -R_k is the
posterior r_k of expert k given the target, and d loss / d s_k = r_k (p_k - onehot): the gradient
of a cross entropy, weighted. Only the target's probability under the mixture is needed. Label
smoothing gives every word a g_v, and then P is needed over the whole vocabulary, for the tokens of
one block at a time.

The adversarial softmax (``adversarial_softmax.py``) lowers s_ky by a margin m_k in each expert. The
gradients for contexts, table and prior keep their form, with the p_k of the lowered scores, and
d loss / d m_k = -d loss / d s_ky.

Note [Linear space where it is exact]
-------------------------------------
P(v) = sum_k pi_k p_kv as a product of [1, K] and [K, N] saves one exponential for each score
against the logsumexp. It loses terms below 1e-38, the smallest normal float32. Where every P(v) of
a block is above 1e-30, they are at most K * 1e-8 of it, less than float32 can resolve. The smallest
P(v) of each block is checked, and a block that fails the check is computed again in log space.

To look at a number the host waits for a GPU to finish. There, all blocks are computed in linear
space first, the smallest P(v) of all is looked at once, and if it fails the check, all blocks are
computed again in log space.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Callable, Iterator, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import check_shape
from spectral_fairseq.functional.adversarial_softmax import lower_targets_, unperturbed_nll
from spectral_fairseq.functional.autograd import differentiable_once, outside_graphs
from spectral_fairseq.functional.blocks import (
    BlockScores,
    aligned,
    check_loss_shapes,
    detached_without_grad,
    filled,
    padded,
    product_dtype,
    smoothing_weights,
    softmax_,
    token_blocks,
    tokens_per_block,
    without_ignored,
)
from spectral_fairseq.functional.gradient_sums import GradientForm, GradientSums, scaled_gradients
from spectral_fairseq.functional.precision import at_least_float32
from spectral_fairseq.functional.softmax_loss import Losses

SMALLEST_LINEAR = 1e-30


def posterior(log_prior: Tensor, log_likelihood: Tensor) -> Tensor:
    """Return r_k = pi_k p_k(y) / sum_j pi_j p_j(y), the probability of each expert given a word.

    Args:
        log_prior: log pi, shape (*, K).
        log_likelihood: log p_k(y), shape (*, K).

    Returns:
        Shape (*, K); sums to 1.
    """
    return torch.softmax(log_prior + log_likelihood, -1)


class TargetMargin(NamedTuple):
    """Where scores are lowered: targets y, shape (t,), and margins m, shape (t, K)."""

    targets: Tensor
    margin: Tensor


class _LinearSpace:
    """Decides which blocks linear space is exact for; see Note [Linear space where it is exact].

    Args:
        device: of the scores.
    """

    def __init__(self, device: torch.device) -> None:
        self._looks_at_the_end = device.type == "cuda"
        self._smallest: Optional[Tensor] = None
        self._failed = False

    def exact(self, mixture: Tensor) -> bool:
        """Return whether the log of P, shape (t, N), is to be taken."""
        if not self._looks_at_the_end:
            return float(mixture.amin()) > SMALLEST_LINEAR
        if not self._failed:
            smallest = mixture.amin()
            known = self._smallest
            self._smallest = smallest if known is None else torch.minimum(known, smallest)
        return not self._failed

    def failed(self) -> bool:
        """Return whether all blocks have to be computed again, now in log space."""
        self._failed = self._smallest is not None and not float(self._smallest) > SMALLEST_LINEAR
        return self._failed


class _MixtureBlock:
    """The experts' probabilities and the log-mixture over the vocabulary, for a few tokens.

    Args:
        contexts: h, shape (t, K, d), in the dtype of the products.
        log_prior: log pi, shape (t, K).
        block_scores: W and b.
        linear_space: decides how P is computed.
        margins: what the scores of the targets lose.
    """

    def __init__(
        self,
        contexts: Tensor,
        log_prior: Tensor,
        block_scores: BlockScores,
        linear_space: _LinearSpace,
        margins: Optional[TargetMargin] = None,
    ) -> None:
        self.log_prior = log_prior
        self.probabilities = expert_scores(contexts, block_scores, margins)  # [t, K, N]
        log_z = softmax_(self.probabilities)  # [t, K]
        mixture = torch.bmm(log_prior.exp().unsqueeze(1), self.probabilities).squeeze(1)
        self.joint: Optional[Tensor] = None
        if linear_space.exact(mixture):
            self.log_mixture = mixture.log_()  # [t, N]
        else:
            # See Note [Linear space where it is exact].
            joint = expert_scores(contexts, block_scores, margins)
            joint += (log_prior - log_z).unsqueeze(-1)
            self.log_mixture = torch.logsumexp(joint, 1)
            self.joint = joint

    def gradient_(self, upstream: Tensor) -> Tuple[Tensor, Tensor]:
        """Turn the probabilities into d loss / d scores; see Note [Gradients of a mixture].

        Args:
            upstream: g, d loss / d log P(v), shape (t, N).

        Returns:
            d loss / d scores, shape (t, K, N), and d loss / d log pi, shape (t, K).
        """
        p = self.probabilities
        if self.joint is not None:
            # No expert has a share in a word without probability.
            finite = self.log_mixture.masked_fill(self.log_mixture.eq(-math.inf), 0.0)
            weighted = self.joint.sub_(finite.unsqueeze(1)).exp_()
            weighted.mul_(upstream.unsqueeze(1))  # [t, K, N], g_v rho_kv
            share = weighted.sum(-1)  # [t, K]
            return weighted.sub_(p.mul_(share.unsqueeze(-1))), share
        ratio = upstream * self.log_mixture.neg().exp_()  # [t, N], g_v / P(v)
        prior = self.log_prior.exp()
        share = prior * torch.bmm(p, ratio.unsqueeze(-1)).squeeze(-1)  # [t, K]
        factor = torch.empty_like(ratio)
        for k in range(p.size(1)):
            # Expert by expert, so that no second tensor of t x K x N is held.
            torch.mul(ratio, prior[:, k, None], out=factor).sub_(share[:, k, None])
            p[:, k].mul_(factor)
        return p, share


def expert_scores(
    contexts: Tensor, block_scores: BlockScores, margins: Optional[TargetMargin] = None
) -> Tensor:
    """Return W h_k + b of ``contexts``, shape (t, K, d), as a new tensor of shape (t, K, N)."""
    scores = block_scores(contexts.flatten(0, 1))
    scores = scores.view(contexts.size(0), contexts.size(1), -1)
    if margins is not None:
        index = margins.targets.unsqueeze(1).expand_as(margins.margin)
        lower_targets_(scores, index, margins.margin)
    return scores


def _expert_blocks(
    contexts: Tensor,
    log_prior: Tensor,
    block_scores: BlockScores,
    block_elements: Optional[int] = None,
) -> Iterator[Tuple[slice, int, Tensor, Tensor]]:
    """Yield the tokens of each block, its size, and its contexts and log-prior filled up to it."""
    tokens, experts = log_prior.shape
    block = tokens_per_block(block_scores.table, block_elements, softmaxes=experts)
    for part, size in token_blocks(tokens, block):
        block_contexts = block_scores.rows(contexts[part], size)  # [t, K, d]
        block_log_prior = filled(log_prior[part].to(block_scores.accumulation_dtype), size)
        yield part, size, block_contexts, block_log_prior  # [t, K]


def _rows_of(part: slice, experts: int) -> slice:
    """Return the rows of a block's tokens in contexts of shape (T K, d)."""
    return slice(part.start * experts, part.stop * experts)


class _LogMixture(torch.autograd.Function):
    """The log-mixture, with the experts recomputed in the backward pass and never stored."""

    @staticmethod
    def forward(
        ctx: Any, contexts: Tensor, log_prior: Tensor, matrix: Tensor, bias: Optional[Tensor]
    ) -> Tensor:
        ctx.dtype = product_dtype(contexts, matrix, bounded=False)
        ctx.linear_space = _LinearSpace(contexts.device)
        ctx.save_for_backward(contexts, log_prior, matrix, bias)
        output = contexts.new_empty(
            (log_prior.size(0), matrix.size(0)), dtype=at_least_float32(ctx.dtype)
        )
        with torch.autocast(contexts.device.type, enabled=False):
            block_scores = BlockScores(matrix, bias, ctx.dtype)

            def fill_output() -> None:
                for part, _, block_contexts, block_log_prior in _expert_blocks(
                    contexts, log_prior, block_scores
                ):
                    mixed = _MixtureBlock(
                        block_contexts, block_log_prior, block_scores, ctx.linear_space
                    )
                    output[part] = mixed.log_mixture[: part.stop - part.start]
                    del mixed  # its scores, before those of the next block are computed

            fill_output()
            if ctx.linear_space.failed():
                fill_output()
        return output

    @staticmethod
    @differentiable_once("log_mixture")
    def backward(ctx: Any, upstream: Tensor) -> Tuple[Optional[Tensor], ...]:
        contexts, log_prior, matrix, bias = ctx.saved_tensors
        sum_dtype = at_least_float32(ctx.dtype)
        needed = tuple(ctx.needs_input_grad[i] for i in (0, 2, 3))
        sums = GradientSums(contexts.flatten(0, 1), matrix, bias, sum_dtype, needed)
        shares = torch.zeros(log_prior.shape, dtype=sum_dtype, device=log_prior.device)
        with torch.autocast(contexts.device.type, enabled=False):
            block_scores = BlockScores(matrix, bias, ctx.dtype)
            for part, size, block_contexts, block_log_prior in _expert_blocks(
                contexts, log_prior, block_scores
            ):
                mixed = _MixtureBlock(
                    block_contexts, block_log_prior, block_scores, ctx.linear_space
                )
                gradient, share = mixed.gradient_(padded(upstream[part].to(sum_dtype), size))
                shares[part] = share[: part.stop - part.start]
                sums.add_block(
                    _rows_of(part, log_prior.size(1)),
                    block_contexts.flatten(0, 1),
                    gradient.flatten(0, 1),
                    block_scores.table,
                )
                del mixed, gradient  # as in the forward pass
        of_contexts, of_matrix, of_bias = sums.results()
        if of_contexts is not None:
            of_contexts = of_contexts.view_as(contexts)
        return of_contexts, shares.to(log_prior.dtype), of_matrix, of_bias


def _check_shapes(
    contexts: Tensor,
    log_prior: Tensor,
    targets: Optional[Tensor],
    matrix: Tensor,
    bias: Optional[Tensor],
) -> None:
    check_loss_shapes(contexts, targets, matrix, bias)
    remedy = "Compute contexts and prior from the same features."
    check_shape("`log_prior`", log_prior, contexts.shape[:-1], remedy)


@outside_graphs
def log_mixture(
    contexts: Tensor, log_prior: Tensor, matrix: Tensor, bias: Optional[Tensor] = None
) -> Tensor:
    """Return log P(v) = logsumexp_k(log pi_k + log softmax(W h_k + b)_v).

    Both passes hold tokens x N numbers instead of tokens x K x N, and any loss can follow.

    Args:
        contexts: h, shape (*, K, d).
        log_prior: log pi, shape (*, K).
        matrix: W, shape (N, d).
        bias: b, shape (N,).

    Returns:
        Shape (*, N), in float32 (float64 for float64 input). Only first derivatives.

    Raises:
        ConfigurationError: shapes that do not fit together.
    """
    _check_shapes(contexts, log_prior, None, matrix, bias)
    mixed: Tensor = _LogMixture.apply(
        contexts.reshape(-1, contexts.size(-2), contexts.size(-1)),  # [T, K, d]
        log_prior.reshape(-1, log_prior.size(-1)),  # [T, K]
        matrix,
        bias,
    )
    return mixed.view(list(contexts.shape[:-2]) + [matrix.size(0)])


class _Block(NamedTuple):
    """The tokens of one block; those behind the first ``real`` only fill it up.

    Attributes:
        part: where the real tokens stand in the batch.
        real: their number.
        contexts: h, shape (t, K, d), in the dtype of the products.
        log_prior: log pi, shape (t, K).
        targets: y, shape (t,).
        margin: m, shape (t, K), or ``None``.
    """

    part: slice
    real: int
    contexts: Tensor
    log_prior: Tensor
    targets: Tensor
    margin: Optional[Tensor]


class _MixtureSums:
    """Losses and gradients, summed over the blocks of a batch.

    Args:
        contexts: h, shape (T, K, d).
        log_prior: log pi, shape (T, K).
        matrix: W, shape (N, d).
        bias: b, shape (N,).
        margin: m, shape (T, K).
        dtype: of the sums.
        needed: which gradients of contexts, log prior, table, bias and margin autograd asks for.

    Attributes:
        needed: whether it asks for any.
        loss: the loss.
        nll: the negative log-likelihood.
        gradients: of contexts, table and bias.
        log_prior: d loss / d log pi, shape (T, K).
        margin: d loss / d m, shape (T, K), or ``None``.
    """

    def __init__(
        self,
        contexts: Tensor,
        log_prior: Tensor,
        matrix: Tensor,
        bias: Optional[Tensor],
        margin: Optional[Tensor],
        dtype: torch.dtype,
        needed: Tuple[bool, bool, bool, bool, bool],
    ) -> None:
        self.needed = any(needed)
        self.loss, self.nll = (contexts.new_zeros((), dtype=dtype) for _ in range(2))
        of_sums = (needed[0], needed[2], needed[3])
        self.gradients = GradientSums(contexts.flatten(0, 1), matrix, bias, dtype, of_sums)
        self.log_prior = torch.zeros(log_prior.shape, dtype=dtype, device=log_prior.device)
        self.margin = None if margin is None else torch.zeros_like(self.log_prior)


def _add_likelihood(block: _Block, block_scores: BlockScores, sums: _MixtureSums) -> None:
    """Add the plain negative log-likelihood of a block, and its gradients.

    Only the target's probability under the mixture is needed: d loss / d s_k = r_k (p_k - onehot).
    """
    real, experts = block.real, block.log_prior.size(1)
    rows = block.contexts.flatten(0, 1)  # [t K, d]
    targets = block.targets.repeat_interleave(experts)  # [t K]
    lowered = None if block.margin is None else block.margin.flatten()
    probabilities, log_z, target_score = block_scores.softmax(rows, targets, lowered)
    log_likelihood = (target_score - log_z).view(-1, experts)  # [t, K]
    nll = -torch.logsumexp(block.log_prior + log_likelihood, 1)[:real].sum()
    sums.loss += nll
    responsibility = posterior(block.log_prior, log_likelihood)  # [t, K]
    responsibility[real:] = 0
    sums.log_prior[block.part] = -responsibility[:real]
    if block.margin is not None and sums.margin is not None:
        miss = -torch.expm1(log_likelihood)  # 1 - p_k(y)
        sums.margin[block.part] = (responsibility * miss)[:real]
        plain = -unperturbed_nll(-log_likelihood, block.margin)
        nll = -torch.logsumexp(block.log_prior + plain, 1)[:real].sum()
    sums.nll += nll
    weights = responsibility.flatten()
    sums.gradients.add_block(
        _rows_of(block.part, experts),
        rows,
        probabilities,
        block_scores.table,
        GradientForm(targets, weights, weights),
    )


def _add_smoothed(
    block: _Block,
    block_scores: BlockScores,
    sums: _MixtureSums,
    linear_space: _LinearSpace,
    target_weight: float,
    uniform: float,
) -> None:
    """Add the label-smoothed loss of a block, and its gradients.

    Every word has a derivative g_v, so P is computed over the whole vocabulary.

    Args:
        block: the tokens.
        block_scores: W and b.
        sums: to add to.
        linear_space: decides how P is computed.
        target_weight: of the target's -log P.
        uniform: weight of every word's.
    """
    real, experts = block.real, block.log_prior.size(1)
    margins = None if block.margin is None else TargetMargin(block.targets, block.margin)
    mixed = _MixtureBlock(block.contexts, block.log_prior, block_scores, linear_space, margins)
    log_p = mixed.log_mixture[:real]
    nll = -log_p.gather(1, block.targets[:real].unsqueeze(1)).sum()
    sums.nll += nll
    sums.loss += target_weight * nll + uniform * -log_p.sum()
    if not sums.needed:
        return
    upstream = torch.full_like(mixed.log_mixture, -uniform)  # g
    hit = upstream.new_full((len(upstream), 1), -target_weight)
    upstream.scatter_add_(1, block.targets.unsqueeze(1), hit)
    upstream[real:] = 0
    gradient, share = mixed.gradient_(upstream)  # [t, K, N], [t, K]
    sums.log_prior[block.part] = share[:real]
    if sums.margin is not None:
        index = block.targets.view(-1, 1, 1).expand(-1, experts, 1)
        sums.margin[block.part] = -gradient.gather(2, index)[:real].squeeze(2)
    sums.gradients.add_block(
        _rows_of(block.part, experts),
        block.contexts.flatten(0, 1),
        gradient.flatten(0, 1),
        block_scores.table,
    )


class _MixtureCrossEntropy(torch.autograd.Function):
    """(loss_sum, nll_sum), with gradients of loss_sum only, computed in the forward pass.

    With a margin and without label smoothing nll_sum is that of the scores as they are. See
    Note [Gradients of a mixture], and ``gradient_sums.py``, Note [Gradients in the forward pass].
    """

    @staticmethod
    def forward(
        ctx: Any,
        contexts: Tensor,
        log_prior: Tensor,
        targets: Tensor,
        matrix: Tensor,
        bias: Optional[Tensor],
        margin: Optional[Tensor],
        label_smoothing: float,
        block_elements: Optional[int],
    ) -> Tuple[Tensor, Tensor]:
        target_weight, uniform = smoothing_weights(label_smoothing, matrix.size(0))
        dtype = product_dtype(contexts, matrix)
        sum_dtype = at_least_float32(dtype)
        needed = tuple(ctx.needs_input_grad[i] for i in (0, 1, 3, 4, 5))
        linear_space = _LinearSpace(contexts.device)
        add: Callable[[_Block, BlockScores, _MixtureSums], None] = _add_likelihood
        if uniform:
            add = partial(
                _add_smoothed,
                linear_space=linear_space,
                target_weight=target_weight,
                uniform=uniform,
            )

        def summed() -> _MixtureSums:
            sums = _MixtureSums(contexts, log_prior, matrix, bias, margin, sum_dtype, needed)
            block_scores = BlockScores(matrix, bias, dtype)
            for part, size, block_contexts, block_log_prior in _expert_blocks(
                contexts, log_prior, block_scores, block_elements
            ):
                block_margin = None if margin is None else filled(margin[part].to(sum_dtype), size)
                block = _Block(
                    part,
                    part.stop - part.start,
                    block_contexts,
                    block_log_prior,
                    filled(targets[part], size),
                    block_margin,
                )
                add(block, block_scores, sums)
            return sums

        with torch.autocast(contexts.device.type, enabled=False):
            sums = summed()
            if linear_space.failed():
                sums = summed()
        sums.gradients.save(ctx, (sums.log_prior, log_prior), (sums.margin, margin))
        ctx.shape = contexts.shape
        ctx.mark_non_differentiable(sums.nll)
        return sums.loss, sums.nll

    @staticmethod
    @differentiable_once("mixture_cross_entropy")
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tuple[Optional[Tensor], ...]:
        contexts, matrix, bias, shares, margin = scaled_gradients(ctx, grad)
        if contexts is not None:
            contexts = contexts.view(ctx.shape)
        return contexts, shares, None, matrix, bias, margin, None, None


@outside_graphs
def mixture_cross_entropy(
    contexts: Tensor,
    log_prior: Tensor,
    targets: Tensor,
    matrix: Tensor,
    bias: Optional[Tensor] = None,
    *,
    margin: Optional[Tensor] = None,
    label_smoothing: float = 0.0,
    ignore_index: Optional[int] = None,
    block_elements: Optional[int] = None,
) -> Losses:
    """Return the label-smoothed cross entropy of a mixture of softmaxes, summed over tokens.

    It equals ``tests/reference/losses.py: smoothed_nll(log_mixture(...))``, or that of
    ``adversarial_log_mixture(...)``, but neither pass holds tokens x K x N, with or without label
    smoothing.

    Args:
        contexts: h, shape (T, K, d).
        log_prior: log pi, shape (T, K).
        targets: shape (T,).
        matrix: W, shape (N, d).
        bias: b, shape (N,).
        margin: what the target's score loses in each expert, m_k = eps ||w_y|| ||h_k|| from
            :func:`~.adversarial_softmax.adversarial_margin`, (T, K); it has a gradient.
        label_smoothing: eps in [0, 1), spread over the words of the mixture.
        ignore_index: target whose tokens contribute zero.
        block_elements: number of scores held at a time; ``None`` is
            ``blocks.elements_for`` the device.

    Returns:
        The losses as of :func:`~.softmax_loss.blockwise_cross_entropy`. With a margin the plain
        ones cost next to nothing without label smoothing, and a pass without gradients with it.

    Raises:
        ConfigurationError: shapes that do not fit together, or eps outside its range.
    """
    _check_shapes(contexts, log_prior, targets, matrix, bias)
    if margin is not None:
        check_shape("`margin`", margin, log_prior.shape, "Give one for each target and expert.")
    targets, contexts, log_prior, margin = without_ignored(
        ignore_index, targets, contexts, log_prior, margin
    )
    contexts, matrix = aligned(contexts, matrix)
    contexts, log_prior, matrix, bias, margin = detached_without_grad(
        contexts, log_prior, matrix, bias, margin
    )
    inputs = (contexts, log_prior, targets, matrix, bias)
    options = (label_smoothing, block_elements)
    loss, plain_nll = _MixtureCrossEntropy.apply(*inputs, margin, *options)
    if margin is None:
        plain_loss = loss.detach()
    elif label_smoothing == 0.0:
        plain_loss = plain_nll
    else:
        with torch.no_grad():
            plain_loss, plain_nll = _MixtureCrossEntropy.apply(
                *detached_without_grad(*inputs), None, *options
            )
    return Losses(loss, plain_loss, plain_nll, torch.zeros_like(plain_nll))
