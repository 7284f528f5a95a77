r"""Adaptive gradient gating: rare words' vectors are not pushed away by other words' contexts.

Yu et al.: "Rare Tokens Degenerate All Tokens: Improving Neural Text Generation
via Adaptive Gradient Gating for Rare Token Embeddings", ACL 2022, https://arxiv.org/abs/2109.03127.
With c_v the count of word v over the last K updates, a word is rare if c_v / K < alpha.
The gradient of row v of the output table W is a sum over tokens t with hidden state h_t,

    d L / d w_v = \sum_t gate(v, t) (d L / d s_tv) h_t,

where for a rare word v that is not the target y_t

    gate(v, t) = c_v / K                               if y_t is not rare,
                 min(c_v / (mean of c over the rare words), 1)    if y_t is rare,

and the gate is 1 otherwise. The hidden states receive their plain gradient, and the scores do not
change. Of a table W = M B' that is stored as factors, both receive what the chain rule makes of the
gated gradient of W. The naive form is ``tests/reference/losses.py``.

Flags: ``--gradient-gating`` 0, ``--gradient-gating-memory`` 1000.
In order: ``plugin/likelihood_gating.py: WordMemory``, ``gates_of_counts``, ``gated_scores``.

Note [Gates by group of targets]
--------------------------------
The gate of a row depends on the token only through the group of its target. Hence

    d L / d W = diag(gate_1) G_1' H_1 + diag(gate_2) G_2' H_2 + what the targets lack,

G the gradient of the scores, with the tokens of the frequent targets in group 1 and those of the
rare ones in group 2. One product is enough for most tokens, a small one for the others, and what
the targets lack is one row for each token of group 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spectral_fairseq.functional.autograd import differentiable_once


class Gates(NamedTuple):
    """The gates of all words.

    Attributes:
        rare: which words are rare, shape (N,).
        frequent_target: the gate of each word where the target is not rare, shape (N,).
        rare_target: the gate of each word where the target is rare, shape (N,).
    """

    rare: Tensor
    frequent_target: Tensor
    rare_target: Tensor


def gates_of_counts(counts: Tensor, updates: int, alpha: float, never_rare: Tensor) -> Gates:
    """Return the gates for counts over some updates; all are 1 where there was no update yet.

    Args:
        counts: c, how often each word was a target, shape (N,).
        updates: K, over how many updates; 0 is allowed.
        alpha: words that occur less often than this in an update are rare.
        never_rare: indices of words that are not gated, such as special symbols, shape (m,).

    Returns:
        The gates, in float32.
    """
    counts = counts.float()
    frequency = counts / max(updates, 1)
    rare = (frequency < alpha) if updates else torch.zeros_like(counts, dtype=torch.bool)
    rare[never_rare] = False
    mean = counts[rare].mean() if bool(rare.any()) else counts.new_ones(())
    ones = torch.ones_like(counts)
    # Without any count the mean is 0; then all gates of the group are 0 / tiny = 0.
    relative = (counts / mean.clamp_min(torch.finfo(torch.float32).tiny)).clamp_max(1.0)
    return Gates(rare, torch.where(rare, frequency, ones), torch.where(rare, relative, ones))


class _GatedScores(torch.autograd.Function):
    """M B' h, of which W = M B' receives a gated gradient; see Note [Gates by group of targets]."""

    @staticmethod
    def forward(
        ctx: Any,
        contexts: Tensor,
        matrix: Tensor,
        basis: Optional[Tensor],
        targets: Tensor,
        rare: Tensor,
        frequent_target: Tensor,
        rare_target: Tensor,
    ) -> Tensor:
        rows = contexts if basis is None else torch.matmul(contexts, basis)
        scores = F.linear(rows, matrix)
        ctx.dtype = scores.dtype  # that of autocast, where it is on
        ctx.save_for_backward(contexts, matrix, basis, targets, rare, frequent_target, rare_target)
        return scores

    @staticmethod
    @differentiable_once("gated_scores")
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Optional[Tensor], ...]:
        contexts, matrix, basis, targets, rare, frequent_target, rare_target = ctx.saved_tensors
        right = None if basis is None else basis.to(ctx.dtype)
        for_contexts = for_matrix = for_basis = None
        with torch.autocast(contexts.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                for_rows = gradient @ matrix.to(ctx.dtype)
                for_contexts = for_rows if right is None else for_rows @ right.t()
                for_contexts = for_contexts.to(contexts.dtype)
            if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
                in_rare = rare[targets]  # [T]
                narrow = contexts.to(ctx.dtype)
                frequent = narrow.masked_fill(in_rare.unsqueeze(1), 0.0)
                total = (gradient.t() @ frequent) * frequent_target.to(ctx.dtype).unsqueeze(1)
                place = in_rare.nonzero().squeeze(1)  # [R]
                rows, inputs, words = gradient[place], narrow[place], targets[place]
                total.addcmul_(rows.t() @ inputs, rare_target.to(ctx.dtype).unsqueeze(1))
                of_target = rows.gather(1, words.unsqueeze(1))  # [R, 1]
                lacking = (1 - rare_target[words]).to(ctx.dtype).unsqueeze(1) * of_target
                total.index_add_(0, words, lacking * inputs)  # d L / d W, [N, d]
                for_matrix = total if right is None else total @ right
                for_matrix = for_matrix.to(matrix.dtype)
                if basis is not None:
                    for_basis = (total.t() @ matrix.to(ctx.dtype)).to(basis.dtype)
        return for_contexts, for_matrix, for_basis, None, None, None, None


def gated_scores(
    contexts: Tensor,
    matrix: Tensor,
    targets: Tensor,
    gates: Gates,
    basis: Optional[Tensor] = None,
) -> Tensor:
    """Return the scores W h, of which only the gradient of W is gated.

    Args:
        contexts: h, shape (T, d).
        matrix: W, shape (N, d); or M of W = M B'.
        targets: y, shape (T,). Tokens that the loss leaves out may have any target.
        gates: of the words.
        basis: B, shape (d, r) where M has the shape (N, r); ``None`` stands for the identity.

    Returns:
        Shape (T, N). Only first derivatives.
    """
    scores: Tensor = _GatedScores.apply(contexts, matrix, basis, targets, *gates)
    return scores
