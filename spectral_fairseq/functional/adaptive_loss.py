"""The adaptive softmax: a head of frequent words, and clusters for all other words.

Grave, Joulin, Cisse, Grangier, Jegou: "Efficient softmax approximation for GPUs", ICML 2017,
https://arxiv.org/abs/1609.04309, in the form of Transformer-XL (Dai et al., ACL 2019,
https://aclanthology.org/P19-1285/): one table W of shape N x d, whose rows are in order of falling
frequency, is cut at c_1 < ... < c_J < N. The head chooses among the first c_1 words and the J
clusters, cluster j among its own words c_j .. c_{j+1} - 1. With scores s = W h + b, head scores
z = (s_1 .. s_{c_1}, q_1 .. q_J) and q the scores of the clusters,

    P(w) = softmax(z)_w                                       for w < c_1
    P(w) = softmax(z)_{c_1 + j} softmax(s_{c_j} .. s_{c_{j+1} - 1})_w        in cluster j

which sums to 1 over all N words. The loss of a token needs the head and at most one cluster.

Flags: ``--adaptive-softmax-cutoff``.
In order: ``heads/adaptive.py: AdaptiveSoftmaxHead``, ``check_cutoffs``, ``adaptive_cross_entropy``.

Note [A head of two sources]
----------------------------
The scores q of the clusters come from vectors of their own, which belong to no table. Where W is
stored in factors, the words' factor and the clusters' vectors are multiplied by different inputs.
The two parts of z are therefore never computed by one product. With log Z_s over the scores of the
words and log Z_q over those of the clusters,

    log Z = logaddexp(log Z_s, log Z_q),    d(-log P) / d s = exp(log Z_s - log Z) softmax(s) - hit,

so that a block of words' scores is handled as in ``blocks.py``, and its gradient is scaled by
one number for each token.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError, check_shape
from spectral_fairseq.functional.autograd import differentiable_once, outside_graphs
from spectral_fairseq.functional.blocks import (
    BlockScores,
    aligned,
    check_loss_shapes,
    detached_without_grad,
    elements_for,
    filled,
    padded,
    product_dtype,
    token_blocks,
)
from spectral_fairseq.functional.gradient_sums import GradientForm, GradientSums, scaled_gradients
from spectral_fairseq.functional.precision import at_least_float32
from spectral_fairseq.functional.products import linear


def check_cutoffs(cutoffs: Sequence[int], vocabulary: int) -> Tuple[int, ...]:
    """Return the cutoffs c_1 .. c_J as a tuple.

    Args:
        cutoffs: first word of each cluster.
        vocabulary: N.

    Raises:
        ConfigurationError: there are none, they do not rise, or one is not between 0 and N.
    """
    cut = tuple(int(c) for c in cutoffs)
    edges = (0, *cut, vocabulary)
    rise = all(before < after for before, after in zip(edges, edges[1:]))
    if not cut or not rise or cut != tuple(cutoffs):
        raise ConfigurationError(
            f"`cutoffs` to be whole numbers above 0 and below {vocabulary}, the size of the "
            "dictionary, each above the one before",
            ",".join(map(str, cutoffs)) or "none",
            "Correct them, for example: 20000,40000,200000; or leave them out ('').",
        )
    return cut


def piece_sizes(cutoffs: Sequence[int], vocabulary: int) -> List[int]:
    """Return the number of words of the head and of each cluster, ``vocabulary`` together."""
    edges = (0, *cutoffs, vocabulary)
    return [after - before for before, after in zip(edges, edges[1:])]


def adaptive_log_probabilities(
    contexts: Tensor,
    cluster_scores: Tensor,
    matrix: Tensor,
    bias: Optional[Tensor],
    cutoffs: Sequence[int],
) -> Tensor:
    """Return log P of every word, in the order of the vocabulary.

    Args:
        contexts: h, shape (*, d).
        cluster_scores: q, shape (*, J).
        matrix: W, shape (N, d).
        bias: b, shape (N,).
        cutoffs: c_1 .. c_J, as :func:`check_cutoffs` returns them.

    Returns:
        Shape (*, N), float32 (float64 for float64 input).
    """
    scores = linear(contexts, matrix, bias)  # [*, N]
    scores = scores.to(at_least_float32(scores.dtype))
    # The backward pass of split makes one gradient of N columns, that of slices would make J + 1.
    head_scores, *tail_scores = scores.split(piece_sizes(cutoffs, matrix.size(0)), -1)
    head = torch.cat([head_scores, cluster_scores.to(scores.dtype)], -1)
    head_words, clusters = torch.log_softmax(head, -1).split(
        [head_scores.size(-1), len(tail_scores)], -1
    )
    tails = [
        clusters[..., j, None] + torch.log_softmax(tail, -1) for j, tail in enumerate(tail_scores)
    ]
    return torch.cat([head_words, *tails], -1)


def _tokens_per_block(contexts: Tensor, words: int, block_elements: Optional[int]) -> int:
    """Return how many tokens of a piece of so many words are computed at a time, at least one.

    A block of a cluster may grow to a quarter of the table's gradient: a pass over N x d for every
    few tokens would cost more than their products.
    """
    if block_elements is None:
        return max(elements_for(contexts.device) // words, contexts.size(1) // 4, 1)
    return max(block_elements // words, 1)


def _tokens_of_pieces(targets: Tensor, cutoffs: Tuple[int, ...]) -> Tuple[Tensor, List[Tensor]]:
    """Return the piece of each target, shape (T,), and the tokens that need each piece.

    Every token needs the head, piece 0. The host waits for a GPU once, for the sizes of all others.
    """
    piece = torch.zeros_like(targets)
    for cutoff in cutoffs:
        piece += targets.ge(cutoff)
    in_order, by_piece = torch.sort(piece, stable=True)
    pieces = torch.arange(1, len(cutoffs) + 1, device=targets.device)
    starts = torch.searchsorted(in_order, pieces).tolist()
    edges = (*starts, targets.size(0))
    clusters = [by_piece[start:end] for start, end in zip(edges, edges[1:])]
    return piece, [torch.arange(targets.size(0), device=targets.device), *clusters]


class _PieceLosses(NamedTuple):
    """What a block of tokens has in one piece, of n words.

    Attributes:
        softmax: over the words of the piece, shape (r, n).
        loss: -log P of the target in this piece, shape (r,).
        form: what makes the gradient of the scores of the softmax.
    """

    softmax: Tensor
    loss: Tensor
    form: GradientForm


def _in_cluster(
    block_scores: BlockScores, rows: Tensor, columns: Tensor, counted: Tensor
) -> _PieceLosses:
    """Return -log of the share that each target has in its cluster.

    Args:
        block_scores: of the cluster's words.
        rows: h, shape (r, d).
        columns: of the targets, shape (r,).
        counted: 1 for a token, 0 for a row that only fills the block up, shape (r,).
    """
    softmax, log_z, target_score = block_scores.softmax(rows, columns)
    form = GradientForm(columns, counted, counted)
    return _PieceLosses(softmax, log_z - target_score, form)


def _in_head(
    block_scores: BlockScores,
    rows: Tensor,
    columns: Tensor,
    counted: Tensor,
    piece: Tensor,
    cluster_scores: Tensor,
) -> Tuple[_PieceLosses, Tensor]:
    """Return -log P of each target, or of its cluster; see Note [A head of two sources].

    Args:
        block_scores: of the head's words.
        rows: h, shape (r, d).
        columns: of the targets that are words of the head, shape (r,).
        counted: as for :func:`_in_cluster`.
        piece: of each target, shape (r,).
        cluster_scores: q, shape (r, J).

    Returns:
        The losses, and d loss / d q, shape (r, J).
    """
    is_word = piece.eq(0)
    columns = columns.masked_fill(~is_word, 0)
    softmax, log_z_words, word_score = block_scores.softmax(rows, columns)
    cluster = (piece - 1).clamp_(min=0).unsqueeze(1)
    cluster_score = cluster_scores.gather(1, cluster).squeeze(1)
    log_z = torch.logaddexp(log_z_words, torch.logsumexp(cluster_scores, 1))
    loss = log_z - torch.where(is_word, word_score, cluster_score)
    weights = (log_z_words - log_z).exp_() * counted
    hits = is_word.to(counted.dtype) * counted
    gradient = (cluster_scores - log_z.unsqueeze(1)).exp_()
    gradient.scatter_add_(1, cluster, is_word.to(counted.dtype).unsqueeze(1) - 1)
    return _PieceLosses(softmax, loss, GradientForm(columns, weights, hits)), gradient


class _AdaptiveCrossEntropy(torch.autograd.Function):
    """Sum of -log P; see ``gradient_sums.py``, Note [Gradients in the forward pass]."""

    @staticmethod
    def forward(
        ctx: Any,
        contexts: Tensor,
        cluster_scores: Tensor,
        targets: Tensor,
        matrix: Tensor,
        bias: Optional[Tensor],
        cutoffs: Tuple[int, ...],
        block_elements: Optional[int],
    ) -> Tensor:
        dtype = product_dtype(contexts, matrix)
        sum_dtype = at_least_float32(dtype)
        needed = tuple(ctx.needs_input_grad[i] for i in (0, 3, 4))
        sums = GradientSums(contexts, matrix, bias, sum_dtype, needed)
        cluster_gradient = torch.zeros_like(cluster_scores, dtype=sum_dtype)
        edges = (0, *cutoffs, matrix.size(0))
        piece, tokens_of = _tokens_of_pieces(targets, cutoffs)
        nll = contexts.new_zeros((), dtype=sum_dtype)
        with torch.autocast(contexts.device.type, enabled=False):
            for piece_tokens, start, end in zip(tokens_of, edges, edges[1:]):
                if piece_tokens.numel() == 0:
                    continue
                piece_bias = None if bias is None else bias[start:end]
                block_scores = BlockScores(matrix[start:end], piece_bias, dtype)
                block = _tokens_per_block(contexts, end - start, block_elements)
                for part, size in token_blocks(piece_tokens.size(0), block):
                    tokens = piece_tokens[part]
                    rows = block_scores.rows(contexts[tokens], size)  # [r, d]
                    real = tokens.size(0)
                    counted = padded(rows.new_ones(real, dtype=sum_dtype), size)  # [r]
                    columns = filled(targets[tokens] - start, size)  # [r]
                    if start == 0:
                        q = filled(cluster_scores[tokens].to(sum_dtype), size)  # [r, J]
                        pieces = filled(piece[tokens], size)  # [r]
                        found, gradient = _in_head(block_scores, rows, columns, counted, pieces, q)
                        cluster_gradient[tokens] = gradient[:real]
                    else:
                        found = _in_cluster(block_scores, rows, columns, counted)
                    found.loss[real:] = 0  # 0 times an infinite loss is no number
                    nll += counted @ found.loss
                    sums.add_block(
                        tokens, rows, found.softmax, block_scores.table, found.form, start
                    )
                    del found  # its softmax, before that of the next block is computed
        sums.save(ctx, (cluster_gradient, cluster_scores))
        return nll

    @staticmethod
    @differentiable_once("adaptive_cross_entropy")
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        contexts, matrix, bias, clusters = scaled_gradients(ctx, grad)
        return contexts, clusters, None, matrix, bias, None, None


@outside_graphs
def adaptive_cross_entropy(
    contexts: Tensor,
    cluster_scores: Tensor,
    targets: Tensor,
    matrix: Tensor,
    bias: Optional[Tensor],
    cutoffs: Sequence[int],
    *,
    block_elements: Optional[int] = None,
) -> Tensor:
    """Return the sum of -log P(target), from the head and only those clusters that have a target.

    It equals gathering the targets from :func:`adaptive_log_probabilities`, but neither pass holds
    tokens x N, and the table's gradient is one tensor whatever the number of clusters.

    Args:
        contexts: h, shape (T, d).
        cluster_scores: q, shape (T, J).
        targets: shape (T,).
        matrix: W, shape (N, d).
        bias: b, shape (N,).
        cutoffs: c_1 .. c_J, as :func:`check_cutoffs` returns them.
        block_elements: number of scores held at a time; ``None`` is ``blocks.elements_for`` the
            device, or more where clusters are large.

    Returns:
        Scalar in float32 (float64 for float64 input), in nats, with first derivatives only.

    Raises:
        ConfigurationError: shapes that do not fit together.
    """
    check_loss_shapes(contexts, targets, matrix, bias)
    shape = (targets.size(0), len(cutoffs))
    check_shape("`cluster_scores`", cluster_scores, shape, "Give one for each token and cluster.")
    contexts, matrix = aligned(contexts, matrix)
    contexts, cluster_scores, matrix, bias = detached_without_grad(
        contexts, cluster_scores, matrix, bias
    )
    return _AdaptiveCrossEntropy.apply(
        contexts, cluster_scores, targets, matrix, bias, tuple(cutoffs), block_elements
    )
