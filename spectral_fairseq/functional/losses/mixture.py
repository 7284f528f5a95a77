"""Mixtures of softmaxes and of contexts over one output table.

Yang, Dai, Salakhutdinov, Cohen: "Breaking the Softmax Bottleneck: A High-Rank RNN Language
Model", ICLR 2018, sections 2.4 and 2.5. With contexts h_k and prior pi_k, k = 1..K,

    MoS:  P(v) = sum_k pi_k softmax(W h_k + b)_v            MoC:  P = softmax(W sum_k pi_k h_k + b)

Everything stays in log space: log P(v) = logsumexp_k(log pi_k + log softmax(W h_k + b)_v).

Note [Gradients of a mixture]
-----------------------------
Let p_k be expert k's softmax, P the mixture, and g_v the derivative of the loss by log P(v). With
the posterior of an expert given a word, rho_kv = pi_k p_kv / P(v), and R_k = sum_v g_v rho_kv,

    d loss / d log pi_k = R_k,        d loss / d s_kv = g_v rho_kv - R_k p_kv.

For the plain negative log-likelihood g is -1 at the target and 0 elsewhere, so that -R_k is the
posterior r_k of expert k given the target, and d loss / d s_k = r_k (p_k - onehot): the gradient
of a cross entropy, weighted. No word but the target needs the mixture. Label smoothing gives every
word a g_v, and then P is needed over the vocabulary, for the tokens of one block at a time.

Note [Linear space where it is exact]
-------------------------------------
P(v) = sum_k pi_k p_kv as a product of [1, K] and [K, N] costs one exponential a score less than
the logsumexp. What it loses are terms below 1e-38, the smallest normal float32: where every
P(v) of a block is above 1e-30 those are at most K * 1e-8 of it, less than float32 can show. The
smallest P(v) of each block is looked at, and a block that fails is done again in log space.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.linalg.products import matmul_transposed
from spectral_fairseq.functional.losses.blockwise import (
    GradientSums,
    accumulation_dtype,
    check_sizes,
    product_dtype,
    scaled_gradients,
    smoothing_weights,
    softmax_,
)
from spectral_fairseq.functional.losses.token_blocks import filled, token_blocks, tokens_per_block

SMALLEST_LINEAR = 1e-30


def posterior(log_prior: Tensor, log_likelihood: Tensor) -> Tensor:
    """r_k = pi_k p_k(y) / sum_j pi_j p_j(y), which expert spoke.

    Args:
        log_prior: log pi, shape (*, K).
        log_likelihood: log p_k(y), shape (*, K).

    Returns:
        Shape (*, K); sums to 1.
    """
    return torch.softmax(log_prior + log_likelihood, -1)


def mixture_of_contexts(contexts: Tensor, log_prior: Tensor) -> Tensor:
    """sum_k pi_k h_k, equation 2 of the paper.

    Args:
        contexts: h, shape (*, K, d).
        log_prior: log pi, shape (*, K).

    Returns:
        Shape (*, d), of the dtype of ``contexts``.
    """
    prior = log_prior.exp().to(contexts.dtype).unsqueeze(-2)  # [*, 1, K]
    return torch.matmul(prior, contexts).squeeze(-2)


def mix_scores(scores: Tensor, log_prior: Tensor) -> Tensor:
    """The log-mixture of the experts' scores, all of them held at once.

    Args:
        scores: W h_k + b, shape (t, K, N).
        log_prior: log pi, shape (t, K).

    Returns:
        Shape (t, N), in float32 (float64 for float64 input).
    """
    if scores.dtype != torch.float64:
        scores = scores.float()
    log_prior = log_prior.to(scores.dtype)
    probabilities = torch.softmax(scores, -1)
    mixture = torch.bmm(log_prior.exp().unsqueeze(1), probabilities).squeeze(1)  # [t, N]
    # See Note [Linear space where it is exact]; TorchScript does not read module constants.
    if mixture.numel() == 0 or float(mixture.amin()) > 1e-30:
        return mixture.log()
    joint = torch.log_softmax(scores, -1) + log_prior.unsqueeze(-1)
    return torch.logsumexp(joint, 1)


class _Block:
    """The experts' probabilities and the log-mixture over the vocabulary, for a few tokens.

    Args:
        contexts: shape (t, K, d), of the dtype of ``table``.
        log_prior: shape (t, K).
        table: W, shape (N, d).
        bias: shape (N,).
    """

    def __init__(
        self, contexts: Tensor, log_prior: Tensor, table: Tensor, bias: Optional[Tensor]
    ) -> None:
        self.log_prior = log_prior
        self.probabilities = expert_scores(contexts, table, bias, log_prior.dtype)  # [t, K, N]
        log_z = softmax_(self.probabilities)  # [t, K]
        mixture = torch.bmm(log_prior.exp().unsqueeze(1), self.probabilities).squeeze(1)
        self.joint: Optional[Tensor] = None
        if float(mixture.amin()) > SMALLEST_LINEAR:
            self.log_mixture = mixture.log_()  # [t, N]
        else:
            # See Note [Linear space where it is exact].
            joint = expert_scores(contexts, table, bias, log_prior.dtype)
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
            weighted = self.joint.sub_(self.log_mixture.unsqueeze(1)).exp_()
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
    contexts: Tensor, table: Tensor, bias: Optional[Tensor], dtype: torch.dtype
) -> Tensor:
    """W h_k + b of ``contexts``, shape (t, K, d), as a fresh tensor of shape (t, K, N)."""
    scores = matmul_transposed(contexts.flatten(0, 1), table).to(dtype)
    if bias is not None:
        scores += bias
    return scores.view(contexts.size(0), contexts.size(1), -1)


class _LogMixture(torch.autograd.Function):
    """The log-mixture, with the experts recomputed in the backward pass and never stored."""

    @staticmethod
    def forward(
        ctx: Any, contexts: Tensor, log_prior: Tensor, matrix: Tensor, bias: Optional[Tensor]
    ) -> Tensor:
        ctx.dtype = product_dtype(contexts, matrix)
        ctx.save_for_backward(contexts, log_prior, matrix, bias)
        exact = accumulation_dtype(ctx.dtype)
        tokens, experts = log_prior.shape
        output = contexts.new_empty((tokens, matrix.size(0)), dtype=exact)
        with torch.autocast(contexts.device.type, enabled=False):
            table = matrix.to(ctx.dtype)
            offset = None if bias is None else bias.to(exact)
            block = tokens_per_block(experts * matrix.size(0))
            for part, size in token_blocks(tokens, block):
                few = filled(contexts[part].to(ctx.dtype), size)  # [t, K, d]
                prior = filled(log_prior[part].to(exact), size)  # [t, K]
                into = output[part]
                into.copy_(_Block(few, prior, table, offset).log_mixture[: into.size(0)])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tuple[Optional[Tensor], ...]:
        contexts, log_prior, matrix, bias = ctx.saved_tensors
        exact = accumulation_dtype(ctx.dtype)
        tokens, experts = log_prior.shape
        rows = contexts.flatten(0, 1)  # [T K, d]
        wanted = ctx.needs_input_grad
        sums = GradientSums(rows, matrix, bias, exact, (wanted[0], False, wanted[2], wanted[3]))
        shares = torch.zeros(log_prior.shape, dtype=exact, device=log_prior.device)
        with torch.autocast(contexts.device.type, enabled=False):
            table = matrix.to(ctx.dtype)
            offset = None if bias is None else bias.to(exact)
            block = tokens_per_block(experts * matrix.size(0))
            for part, size in token_blocks(tokens, block):
                few = filled(contexts[part].to(ctx.dtype), size)  # [t, K, d]
                prior = filled(log_prior[part].to(exact), size)  # [t, K]
                mixed = _Block(few, prior, table, offset)
                gradient, share = mixed.gradient_(filled(upstream[part].to(exact), size))
                shares[part] = share[: part.stop - part.start]
                sums.add_block(
                    part.start * experts, few.flatten(0, 1), None, gradient.flatten(0, 1), table
                )
        return (
            None if sums.contexts is None else sums.contexts.to(contexts.dtype).view_as(contexts),
            shares.to(log_prior.dtype),
            None if sums.matrix is None else sums.matrix.to(matrix.dtype),
            None if sums.bias is None else sums.bias.to(bias.dtype),
        )


def log_mixture(
    contexts: Tensor, log_prior: Tensor, matrix: Tensor, bias: Optional[Tensor] = None
) -> Tensor:
    """log P(v) = logsumexp_k(log pi_k + log softmax(W h_k + b)_v).

    Holds tokens x N, not tokens x K x N, in the backward pass too: a loss that takes the
    log-mixture from here can be any.

    Args:
        contexts: h, shape (*, K, d).
        log_prior: log pi, shape (*, K).
        matrix: W, shape (N, d).
        bias: b, shape (N,).

    Returns:
        Shape (*, N), in float32 (float64 for float64 input). Only first derivatives.
    """
    few = contexts.reshape(-1, contexts.size(-2), contexts.size(-1))  # [T, K, d]
    prior = log_prior.reshape(-1, log_prior.size(-1))  # [T, K]
    mixed: Tensor = _LogMixture.apply(few, prior, matrix, bias)
    return mixed.view(list(contexts.shape[:-2]) + [matrix.size(0)])


def log_mixture_scripted(
    contexts: Tensor, log_prior: Tensor, matrix: Tensor, bias: Optional[Tensor] = None
) -> Tensor:
    """:func:`log_mixture` in terms that TorchScript knows.

    It is for generation, where a step's tokens are few: all their scores are held at once.
    """
    few = contexts.reshape(-1, contexts.size(-2), contexts.size(-1))  # [T, K, d]
    prior = log_prior.reshape(-1, log_prior.size(-1))
    mixed = mix_scores(F.linear(few, matrix, bias), prior)
    return mixed.view(list(contexts.shape[:-2]) + [matrix.size(0)])


class _MixtureCrossEntropy(torch.autograd.Function):
    """(loss_sum, nll_sum); gradients of loss_sum only, found in the forward pass.

    See Note [Gradients in the forward pass] in ``blockwise.py`` and Note [Gradients of a mixture].
    """

    @staticmethod
    def forward(
        ctx: Any,
        contexts: Tensor,
        log_prior: Tensor,
        targets: Tensor,
        matrix: Tensor,
        bias: Optional[Tensor],
        label_smoothing: float,
        block_elements: Optional[int],
    ) -> Tuple[Tensor, Tensor]:
        tokens, experts = log_prior.shape
        vocabulary = matrix.size(0)
        target_weight, uniform = smoothing_weights(label_smoothing, vocabulary)
        dtype = product_dtype(contexts, matrix)
        exact = accumulation_dtype(dtype)
        wanted = ctx.needs_input_grad
        sums = GradientSums(
            contexts.flatten(0, 1), matrix, bias, exact, (wanted[0], False, wanted[3], wanted[4])
        )
        shares = torch.zeros(log_prior.shape, dtype=exact, device=log_prior.device)
        loss_sum, nll_sum = (contexts.new_zeros((), dtype=exact) for _ in range(2))
        with torch.autocast(contexts.device.type, enabled=False):
            table = matrix.to(dtype)
            offset = None if bias is None else bias.to(exact)
            block = tokens_per_block(experts * vocabulary, block_elements)
            for part, size in token_blocks(tokens, block):
                few = filled(contexts[part].to(dtype), size)  # [t, K, d]
                rows = few.flatten(0, 1)  # [t K, d]
                words = filled(targets[part], size)  # [t]
                prior = filled(log_prior[part].to(exact), size)  # [t, K]
                live = part.stop - part.start  # the rows behind these only fill the block
                if uniform:
                    mixed = _Block(few, prior, table, offset)
                    log_p = mixed.log_mixture[:live]
                    nll = -log_p.gather(1, words[:live].unsqueeze(1)).sum()
                    smooth = -log_p.sum()
                    nll_sum += nll
                    loss_sum += target_weight * nll + uniform * smooth
                    upstream = torch.full_like(mixed.log_mixture, -uniform)
                    hit = upstream.new_full((size, 1), -target_weight)
                    upstream.scatter_add_(1, words.unsqueeze(1), hit)
                    upstream[live:] = 0
                    gradient, share = mixed.gradient_(upstream)
                    shares[part] = share[:live]
                    sums.add_block(part.start * experts, rows, None, gradient.flatten(0, 1), table)
                    continue
                scores = expert_scores(few, table, offset, exact)  # [t, K, N]
                index = words.view(-1, 1, 1).expand(-1, experts, 1)
                hit = scores.gather(2, index).squeeze(2)  # [t, K]
                log_likelihood = hit - softmax_(scores)  # [t, K]
                nll = -torch.logsumexp(prior + log_likelihood, 1)[:live].sum()
                nll_sum += nll
                loss_sum += nll
                responsibility = posterior(prior, log_likelihood)  # [t, K]
                responsibility[live:] = 0
                shares[part] = -responsibility[:live]
                sums.add_block(
                    part.start * experts,
                    rows,
                    words.repeat_interleave(experts),
                    scores.flatten(0, 1),
                    table,
                    responsibility.flatten(),
                    responsibility.flatten(),
                )
        sums.save(ctx, shares)
        ctx.prior_dtype = log_prior.dtype
        ctx.shape = contexts.shape
        ctx.mark_non_differentiable(nll_sum)
        return loss_sum, nll_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tuple[Optional[Tensor], ...]:
        contexts, matrix, bias = scaled_gradients(ctx, grad)
        shares = (ctx.saved_tensors[3] * grad).to(ctx.prior_dtype)
        if contexts is not None:
            contexts = contexts.view(ctx.shape)
        return contexts, shares, None, matrix, bias, None, None


def mixture_cross_entropy(
    contexts: Tensor,
    log_prior: Tensor,
    targets: Tensor,
    matrix: Tensor,
    bias: Optional[Tensor] = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: Optional[int] = None,
    block_elements: Optional[int] = None,
) -> Tuple[Tensor, Tensor]:
    """Label-smoothed cross entropy of a mixture of softmaxes, summed over tokens.

    Equal to ``tests/reference/mixture.py: smoothed_nll(log_mixture(...))``; neither pass holds
    tokens x K x N, with or without label smoothing.

    Args:
        contexts: h, shape (T, K, d).
        log_prior: log pi, shape (T, K).
        targets: shape (T,).
        matrix: W, shape (N, d).
        bias: b, shape (N,).
        label_smoothing: eps in [0, 1), over the words of the mixture.
        ignore_index: target whose tokens count for nothing.
        block_elements: scores held at a time; ``None`` is ``token_blocks.BLOCK_ELEMENTS``.

    Returns:
        loss_sum and nll_sum, scalars in float32 (float64 for float64 input), in nats. Only
        loss_sum has a gradient, and only a first one.

    Raises:
        ConfigurationError: sizes that do not fit, or eps outside its range.
    """
    check_sizes(contexts, targets, matrix, bias)
    if log_prior.shape != contexts.shape[:-1]:
        raise ConfigurationError(
            f"a prior of shape {tuple(contexts.shape[:-1])}, one value an expert",
            str(tuple(log_prior.shape)),
            "Take contexts and prior from the same features.",
        )
    if ignore_index is not None:
        kept = targets.ne(ignore_index)
        contexts, log_prior, targets = contexts[kept], log_prior[kept], targets[kept]
    return _MixtureCrossEntropy.apply(
        contexts, log_prior, targets, matrix, bias, label_smoothing, block_elements
    )
