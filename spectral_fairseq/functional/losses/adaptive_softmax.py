"""The adaptive softmax: frequent words first, the others by way of their cluster.

Grave, Joulin, Cisse, Grangier, Jegou: "Efficient softmax approximation for GPUs", ICML 2017, in
the form of Transformer-XL (Dai et al., ACL 2019): one table W of N x d whose rows lie in order of
falling frequency is cut at c_1 < ... < c_J < N. The head chooses among the first c_1 words and the
J clusters, cluster j among its own words c_j .. c_{j+1} - 1. With scores s = W h + b, head scores
z = (s_1 .. s_{c_1}, q_1 .. q_J) and q the clusters' scores,

    P(w) = softmax(z)_w                                       for w < c_1
    P(w) = softmax(z)_{c_1 + j} softmax(s_{c_j} .. s_{c_{j+1} - 1})_w        in cluster j

which sums to 1 over all N words. The loss of a token needs the head and, at most, one cluster.

Note [A head of two sources]
----------------------------
The clusters' scores q come from vectors of their own, which belong to no table: where W is stored
in factors, what multiplies the words' factor is not what multiplies the clusters' vectors. The
two parts of z are therefore never put into one product. With log Z_s over the words' scores and
log Z_q over the clusters',

    log Z = logaddexp(log Z_s, log Z_q),    d(-log P) / d s = exp(log Z_s - log Z) softmax(s) - hit,

so that a block of words' scores is handled as in ``blockwise.py`` and its gradient is scaled by one
number a token.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.linalg.products import matmul_transposed
from spectral_fairseq.functional.losses.blockwise import (
    accumulation_dtype,
    check_sizes,
    product_dtype,
    scaled_gradients,
    softmax_,
)
from spectral_fairseq.functional.losses.token_blocks import filled, token_blocks, tokens_per_block


def check_cutoffs(cutoffs: Sequence[int], vocabulary: int) -> Tuple[int, ...]:
    """The cutoffs c_1 .. c_J as a tuple.

    Args:
        cutoffs: first word of each cluster.
        vocabulary: N.

    Raises:
        ConfigurationError: none, not rising, or not between 0 and N.
    """
    cut = tuple(int(c) for c in cutoffs)
    flag = "--adaptive-softmax-cutoff"
    if not cut:
        raise ConfigurationError(
            f"at least one number in {flag}", "none", "Give one, or use a full softmax."
        )
    if cut[0] < 1 or any(a >= b for a, b in zip(cut, cut[1:])):
        raise ConfigurationError(
            f"{flag} to be whole numbers from 1 on, each above the one before",
            ",".join(map(str, cut)),
            "Correct it, for example: 20000,40000,200000.",
        )
    if cut[-1] >= vocabulary:
        raise ConfigurationError(
            f"every number in {flag} to be below the dictionary's {vocabulary} entries",
            ",".join(map(str, cut)),
            "Give smaller numbers, or an empty value ('') for a full softmax.",
        )
    return cut


def piece_sizes(cutoffs: Sequence[int], vocabulary: int) -> List[int]:
    """Words of the head and of each cluster; they add up to ``vocabulary``."""
    edges = (0, *cutoffs, vocabulary)
    return [after - before for before, after in zip(edges, edges[1:])]


def adaptive_log_probabilities(
    contexts: Tensor,
    cluster_scores: Tensor,
    matrix: Tensor,
    bias: Optional[Tensor],
    cutoffs: Sequence[int],
) -> Tensor:
    """log P of every word, in the order of the vocabulary.

    Args:
        contexts: h, shape (*, d).
        cluster_scores: q, shape (*, J).
        matrix: W, shape (N, d).
        bias: b, shape (N,).
        cutoffs: c_1 .. c_J, as :func:`check_cutoffs` returns them.

    Returns:
        Shape (*, N), float32 (float64 for float64 input).
    """
    scores = F.linear(contexts, matrix, bias)  # [*, N]
    scores = scores.to(accumulation_dtype(scores.dtype))
    # split, not slices: its backward pass makes one gradient of N columns instead of J + 1.
    words, *clusters = scores.split(piece_sizes(cutoffs, matrix.size(0)), -1)
    head = torch.log_softmax(torch.cat([words, cluster_scores.to(words.dtype)], -1), -1)
    of_words, of_clusters = head.split([words.size(-1), len(clusters)], -1)
    tails = [
        of_clusters[..., j, None] + torch.log_softmax(cluster, -1)
        for j, cluster in enumerate(clusters)
    ]
    return torch.cat([of_words, *tails], -1)


class _Sums:
    """The gradients of everything, in the accumulation dtype; absent where not wanted."""

    def __init__(
        self, contexts: Tensor, matrix: Tensor, bias: Optional[Tensor], dtype: torch.dtype,
        wanted: Tuple[bool, ...],
    ) -> None:  # fmt: skip
        def zeros(like: Optional[Tensor], wants: bool) -> Any:
            if like is None or not wants:
                return None
            return torch.zeros(like.shape, dtype=dtype, device=like.device)

        self.contexts = zeros(contexts, wanted[0])
        self.matrix = zeros(matrix, wanted[3])
        self.bias = zeros(bias, wanted[4])

    def add(
        self,
        tokens: Tensor,
        first: int,
        rows: Tensor,
        probabilities: Tensor,
        table: Tensor,
        words: Tensor,
        weights: Tensor,
        hits: Tensor,
    ) -> None:
        """Add what follows from d loss / d s = weights * p - hits * [v = words].

        Args:
            tokens: index of each row's token, each once; rows past the last of them count for
                nothing, and their weights and hits are zero.
            first: word of the first column.
            rows: contexts, shape (r, d), in the dtype of the products.
            probabilities: p, shape (r, n).
            table: the n words' rows of W, in the dtype of the products.
            words: target's column of each row, shape (r,).
            weights: shape (r,).
            hits: shape (r,), 1 or 0.
        """
        exact = probabilities.dtype
        lean = probabilities.to(rows.dtype)
        if self.contexts is not None:
            gradient = matmul_transposed(lean, table.t()).to(exact)  # [r, d]
            gradient *= weights.unsqueeze(1)
            gradient -= table[words].to(exact) * hits.unsqueeze(1)
            self.contexts.index_add_(0, tokens, gradient[: tokens.size(0)])
        end = first + table.size(0)
        if self.matrix is not None:
            few = rows.to(exact)
            weighted = (few * weights.unsqueeze(1)).to(rows.dtype)
            into = self.matrix[first:end]
            if rows.dtype == exact:
                # In place: a cluster's share of the table may be most of it, and its tokens few.
                into.addmm_(lean.t(), weighted)
            else:
                into += lean.t() @ weighted
            into.index_add_(0, words, few * hits.unsqueeze(1), alpha=-1)
        if self.bias is not None:
            into = self.bias[first:end]
            into += weights @ probabilities
            into.index_add_(0, words, hits, alpha=-1)


class _AdaptiveCrossEntropy(torch.autograd.Function):
    """Sum of -log P; see Note [Gradients in the forward pass] in ``blockwise.py``."""

    @staticmethod
    def forward(
        ctx: Any,
        contexts: Tensor,
        cluster_scores: Tensor,
        targets: Tensor,
        matrix: Tensor,
        bias: Optional[Tensor],
        cutoffs: Tuple[int, ...],
        block_tokens: Optional[int],
        trains: bool,
    ) -> Tensor:
        dtype = product_dtype(contexts, matrix)
        exact = accumulation_dtype(dtype)
        # Without gradients autograd still says which inputs could have one.
        wanted = ctx.needs_input_grad if trains else (False,) * 5
        sums = _Sums(contexts, matrix, bias, exact, wanted)
        edges = (0, *cutoffs, matrix.size(0))
        piece = torch.bucketize(targets, torch.tensor(cutoffs, device=targets.device), right=True)
        nll = contexts.new_zeros((), dtype=exact)
        of_clusters = torch.zeros_like(cluster_scores, dtype=exact)

        with torch.autocast(contexts.device.type, enabled=False):
            for j, (start, end) in enumerate(zip(edges, edges[1:])):
                if j == 0:
                    mine = torch.arange(targets.size(0), device=targets.device)
                else:
                    mine = piece.eq(j).nonzero().squeeze(1)
                if mine.numel() == 0:
                    continue
                table = matrix[start:end].to(dtype)
                # A block of a cluster may grow to a quarter of the table's gradient: a pass over
                # N x d for every few tokens would cost more than their products.
                automatic = max(tokens_per_block(end - start), contexts.size(1) // 4)
                for part, size in token_blocks(mine.size(0), block_tokens or automatic):
                    tokens = mine[part]
                    live = tokens.size(0)  # the rows behind these only fill the block
                    rows = filled(contexts[tokens].to(dtype), size)  # [r, d]
                    counts = filled(rows.new_ones(live, dtype=exact), size)  # [r], 1 or 0
                    scores = matmul_transposed(rows, table).to(exact)  # [r, n]
                    if bias is not None:
                        scores += bias[start:end].to(exact)
                    words = filled(targets[tokens] - start, size)
                    if j > 0:
                        hit = scores.gather(1, words.unsqueeze(1)).squeeze(1)
                        nll += counts @ (softmax_(scores) - hit)
                        if trains:
                            sums.add(tokens, start, rows, scores, table, words, counts, counts)
                        continue
                    # See Note [A head of two sources].
                    is_word = filled(piece[tokens].eq(0), size)
                    words = words.masked_fill(~is_word, 0)
                    hit = scores.gather(1, words.unsqueeze(1)).squeeze(1)
                    q = filled(cluster_scores[tokens].to(exact), size)  # [r, J]
                    cluster = filled((piece[tokens] - 1).clamp_(min=0).unsqueeze(1), size)
                    hit = torch.where(is_word, hit, q.gather(1, cluster).squeeze(1))
                    log_z_words = softmax_(scores)
                    log_z = torch.logaddexp(log_z_words, torch.logsumexp(q, 1))
                    nll += counts @ (log_z - hit)
                    if trains:
                        share = (log_z_words - log_z).exp_() * counts
                        hits = is_word.to(exact)
                        sums.add(tokens, start, rows, scores, table, words, share, hits)
                        gradient = (q - log_z.unsqueeze(1)).exp_()
                        gradient.scatter_add_(1, cluster, hits.unsqueeze(1) - 1)
                        of_clusters[tokens] = gradient[:live]
        ctx.dtypes = (contexts.dtype, matrix.dtype, None if bias is None else bias.dtype)
        ctx.cluster_dtype = cluster_scores.dtype
        ctx.save_for_backward(sums.contexts, sums.matrix, sums.bias, of_clusters)
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        contexts, matrix, bias = scaled_gradients(ctx, grad)
        clusters = (ctx.saved_tensors[3] * grad).to(ctx.cluster_dtype)
        return contexts, clusters, None, matrix, bias, None, None, None


def adaptive_cross_entropy(
    contexts: Tensor,
    cluster_scores: Tensor,
    targets: Tensor,
    matrix: Tensor,
    bias: Optional[Tensor],
    cutoffs: Sequence[int],
    *,
    block_tokens: Optional[int] = None,
) -> Tensor:
    """Sum over tokens of -log P(target), with the head and only the clusters that are hit.

    Equal to gathering the targets from :func:`adaptive_log_probabilities`; neither pass holds
    tokens x N, and the table's gradient is one tensor whatever the number of clusters.

    Args:
        contexts: h, shape (T, d).
        cluster_scores: q, shape (T, J).
        targets: shape (T,).
        matrix: W, shape (N, d).
        bias: b, shape (N,).
        cutoffs: c_1 .. c_J, as :func:`check_cutoffs` returns them.
        block_tokens: tokens held at a time; ``None`` chooses by the number of scores.

    Returns:
        Scalar in float32 (float64 for float64 input), in nats; only first derivatives.

    Raises:
        ConfigurationError: sizes that do not fit.
    """
    check_sizes(contexts, targets, matrix, bias)
    if cluster_scores.shape != (targets.size(0), len(cutoffs)):
        raise ConfigurationError(
            f"cluster scores of shape {(targets.size(0), len(cutoffs))}",
            str(tuple(cluster_scores.shape)),
            "Give one score for each token and cluster.",
        )
    cut, trains = tuple(cutoffs), torch.is_grad_enabled()
    return _AdaptiveCrossEntropy.apply(
        contexts, cluster_scores, targets, matrix, bias, cut, block_tokens, trains
    )
