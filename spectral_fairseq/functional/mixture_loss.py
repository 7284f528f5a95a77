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
from typing import Any, Iterator, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import check_shape
from spectral_fairseq.functional.adversarial_softmax import lower_targets_, unperturbed_nll
from spectral_fairseq.functional.autograd import differentiable_once, outside_graphs
from spectral_fairseq.functional.blocks import (
    BlockScores,
    aligned,
    at_rows,
    check_loss_shapes,
    detached_without_grad,
    filled,
    kept_rows,
    padded,
    product_dtype,
    smoothing_weights,
    softmax_,
    token_blocks,
    tokens_per_block,
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
        self._failed: Optional[bool] = None  # not known before the last block

    def exact(self, mixture: Tensor) -> bool:
        """Return whether the log of P, shape (t, N), is to be taken."""
        if not self._looks_at_the_end:
            return float(mixture.amin()) > SMALLEST_LINEAR
        if self._failed is None:
            smallest = mixture.amin()
            known = self._smallest
            self._smallest = smallest if known is None else torch.minimum(known, smallest)
        return not self._failed

    def failed(self) -> bool:
        """Return whether all blocks have to be computed again, now in log space."""
        self._failed = self._smallest is not None and not float(self._smallest) > SMALLEST_LINEAR
        return self._failed


class _Block(NamedTuple):
    """A few tokens of a batch; those behind the first ``real`` only fill the block up.

    Attributes:
        part: where the real tokens stand in the batch.
        size: t, the number of tokens with those that fill up.
        contexts: h, shape (t, K, d), in the dtype of the products.
        log_prior: log pi, shape (t, K), in that of the sums.
    """

    part: slice
    size: int
    contexts: Tensor
    log_prior: Tensor

    @property
    def real(self) -> int:
        """The number of real tokens."""
        return self.part.stop - self.part.start

    @property
    def rows(self) -> Tensor:
        """h of all experts, shape (t K, d)."""
        return self.contexts.flatten(0, 1)

    @property
    def place(self) -> slice:
        """Where the rows of the real tokens stand in contexts of shape (T K, d)."""
        experts = self.log_prior.size(1)
        return slice(self.part.start * experts, self.part.stop * experts)


def _blocks(
    contexts: Tensor,
    log_prior: Tensor,
    block_scores: BlockScores,
    block_elements: Optional[int] = None,
) -> Iterator[_Block]:
    """Yield the blocks of a batch, h of shape (T, K, d) and log pi of shape (T, K)."""
    tokens, experts = log_prior.shape
    block = tokens_per_block(block_scores.table, block_elements, softmaxes=experts)
    for part, size in token_blocks(tokens, block):
        block_log_prior = filled(log_prior[part].to(block_scores.accumulation_dtype), size)
        yield _Block(part, size, block_scores.rows(contexts[part], size), block_log_prior)


class _MixtureBlock:
    """The experts' probabilities and the log-mixture over the vocabulary, for a few tokens.

    Args:
        block: the tokens.
        block_scores: W and b.
        linear_space: decides how P is computed.
        margins: what the scores of the targets lose.
    """

    def __init__(
        self,
        block: _Block,
        block_scores: BlockScores,
        linear_space: _LinearSpace,
        margins: Optional[TargetMargin] = None,
    ) -> None:
        self.log_prior = block.log_prior
        self.probabilities = expert_scores(block.contexts, block_scores, margins)  # [t, K, N]
        log_z = softmax_(self.probabilities)  # [t, K]
        mixture = torch.bmm(self.log_prior.exp().unsqueeze(1), self.probabilities).squeeze(1)
        self.joint: Optional[Tensor] = None
        if linear_space.exact(mixture):
            self.log_mixture = mixture.log_()  # [t, N]
        else:
            # See Note [Linear space where it is exact].
            joint = expert_scores(block.contexts, block_scores, margins)
            joint += (self.log_prior - log_z).unsqueeze(-1)
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
                for block in _blocks(contexts, log_prior, block_scores):
                    mixed = _MixtureBlock(block, block_scores, ctx.linear_space)
                    output[block.part] = mixed.log_mixture[: block.real]
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
            for block in _blocks(contexts, log_prior, block_scores):
                mixed = _MixtureBlock(block, block_scores, ctx.linear_space)
                from_above = padded(upstream[block.part].to(sum_dtype), block.size)
                gradient, share = mixed.gradient_(from_above)
                shares[block.part] = share[: block.real]
                sums.add_block(block.place, block.rows, gradient.flatten(0, 1), block_scores.table)
                del mixed, from_above, gradient  # as in the forward pass
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


class _MixtureSums:
    """Losses and gradients, to which the blocks of a batch are added one by one.

    Args:
        contexts: h, shape (T, K, d).
        log_prior: log pi, shape (T, K).
        targets: y, shape (T,).
        matrix: W, shape (N, d).
        bias: b, shape (N,).
        margin: m, shape (T, K), or ``None``.
        label_smoothing: eps.
        linear_space: decides how P is computed.
        dtype: of the products.
        needed: which gradients of contexts, log prior, table, bias and margin autograd asks for.

    Attributes:
        block_scores: W and b.
        loss: the loss.
        nll: the negative log-likelihood.
        gradients: of contexts, table and bias.
        of_log_prior: d loss / d log pi, shape (T, K).
        of_margin: d loss / d m, shape (T, K), or ``None``.
    """

    def __init__(
        self,
        contexts: Tensor,
        log_prior: Tensor,
        targets: Tensor,
        matrix: Tensor,
        bias: Optional[Tensor],
        margin: Optional[Tensor],
        label_smoothing: float,
        *,
        linear_space: _LinearSpace,
        dtype: torch.dtype,
        needed: Tuple[bool, bool, bool, bool, bool],
    ) -> None:
        self._targets, self._margin = targets, margin
        self._linear_space, self._needed = linear_space, any(needed)
        self._target_weight, self._uniform = smoothing_weights(label_smoothing, matrix.size(0))
        self.block_scores = BlockScores(matrix, bias, dtype)
        sum_dtype = self.block_scores.accumulation_dtype
        self.loss, self.nll = (contexts.new_zeros((), dtype=sum_dtype) for _ in range(2))
        of_sums = (needed[0], needed[2], needed[3])
        self.gradients = GradientSums(contexts.flatten(0, 1), matrix, bias, sum_dtype, of_sums)
        self.of_log_prior = torch.zeros(log_prior.shape, dtype=sum_dtype, device=log_prior.device)
        self.of_margin = None if margin is None else torch.zeros_like(self.of_log_prior)

    def add(self, block: _Block) -> None:
        """Add the loss of a block, and its gradients."""
        targets = filled(self._targets[block.part], block.size)  # [t]
        margins = None
        if self._margin is not None:
            margin = self._margin[block.part].to(block.log_prior.dtype)
            margins = TargetMargin(targets, filled(margin, block.size))
        if self._uniform:
            self._add_smoothed(block, targets, margins)
        else:
            self._add_likelihood(block, targets, margins)

    def _add_likelihood(
        self, block: _Block, targets: Tensor, margins: Optional[TargetMargin]
    ) -> None:
        """Add the plain negative log-likelihood of a block, and its gradients.

        Only the target's probability under the mixture is needed: d loss / d s_k = r_k (p_k -
        onehot).
        """
        real, experts = block.real, block.log_prior.size(1)
        rows = block.rows  # [t K, d]
        targets = targets.repeat_interleave(experts)  # [t K]
        lowered = None if margins is None else margins.margin.flatten()
        probabilities, log_z, target_score = self.block_scores.softmax(rows, targets, lowered)
        log_likelihood = (target_score - log_z).view(-1, experts)  # [t, K]
        nll = -torch.logsumexp(block.log_prior + log_likelihood, 1)[:real].sum()
        self.loss += nll
        responsibility = posterior(block.log_prior, log_likelihood)  # [t, K]
        responsibility[real:] = 0
        self.of_log_prior[block.part] = -responsibility[:real]
        if margins is not None and self.of_margin is not None:
            miss = -torch.expm1(log_likelihood)  # 1 - p_k(y)
            self.of_margin[block.part] = (responsibility * miss)[:real]
            plain = -unperturbed_nll(-log_likelihood, margins.margin)
            nll = -torch.logsumexp(block.log_prior + plain, 1)[:real].sum()
        self.nll += nll
        weights = responsibility.flatten()
        form = GradientForm(targets, weights, weights)
        self.gradients.add_block(block.place, rows, probabilities, self.block_scores.table, form)

    def _add_smoothed(
        self, block: _Block, targets: Tensor, margins: Optional[TargetMargin]
    ) -> None:
        """Add the label-smoothed loss of a block, and its gradients.

        Every word has a derivative g_v, so P is computed over the whole vocabulary.
        """
        real, experts = block.real, block.log_prior.size(1)
        mixed = _MixtureBlock(block, self.block_scores, self._linear_space, margins)
        log_p = mixed.log_mixture[:real]
        nll = -log_p.gather(1, targets[:real].unsqueeze(1)).sum()
        self.nll += nll
        self.loss += self._target_weight * nll + self._uniform * -log_p.sum()
        if not self._needed:
            return
        upstream = torch.full_like(mixed.log_mixture, -self._uniform)  # g
        hit = upstream.new_full((len(upstream), 1), -self._target_weight)
        upstream.scatter_add_(1, targets.unsqueeze(1), hit)
        upstream[real:] = 0
        gradient, share = mixed.gradient_(upstream)  # [t, K, N], [t, K]
        self.of_log_prior[block.part] = share[:real]
        if self.of_margin is not None:
            index = targets.view(-1, 1, 1).expand(-1, experts, 1)
            self.of_margin[block.part] = -gradient.gather(2, index)[:real].squeeze(2)
        table = self.block_scores.table
        self.gradients.add_block(block.place, block.rows, gradient.flatten(0, 1), table)


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
        dtype = product_dtype(contexts, matrix)
        needed = tuple(ctx.needs_input_grad[i] for i in (0, 1, 3, 4, 5))
        linear_space = _LinearSpace(contexts.device)
        inputs = (contexts, log_prior, targets, matrix, bias, margin)

        def summed() -> _MixtureSums:
            sums = _MixtureSums(
                *inputs, label_smoothing, linear_space=linear_space, dtype=dtype, needed=needed
            )
            for block in _blocks(contexts, log_prior, sums.block_scores, block_elements):
                sums.add(block)
            return sums

        with torch.autocast(contexts.device.type, enabled=False):
            sums = summed()
            if linear_space.failed():
                sums = summed()
        sums.gradients.save(ctx, (sums.of_log_prior, log_prior), (sums.of_margin, margin))
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
    kept = kept_rows(ignore_index, targets)
    targets, contexts, log_prior, margin = at_rows(kept, targets, contexts, log_prior, margin)
    contexts, matrix = aligned(contexts, matrix)
    contexts, log_prior, matrix, bias, margin = detached_without_grad(
        contexts, log_prior, matrix, bias, margin
    )
    inputs = (contexts, log_prior, targets, matrix, bias)
    options = (label_smoothing, block_elements)
    loss, plain_nll = _MixtureCrossEntropy.apply(*inputs, margin, *options)
    if margin is None:
        plain_loss = loss.detach().clone()  # whoever divides the loss in place leaves it as it is
    elif label_smoothing == 0.0:
        plain_loss = plain_nll
    else:
        with torch.no_grad():
            plain_loss, plain_nll = _MixtureCrossEntropy.apply(
                *detached_without_grad(*inputs), None, *options
            )
    return Losses(loss, plain_loss, plain_nll, torch.zeros_like(plain_nll))
