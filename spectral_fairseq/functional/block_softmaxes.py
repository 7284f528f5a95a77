"""The softmax of a batch, one block of tokens after the other, and the gradients that follow.

With contexts h, a table W, a bias b and margins m of the targets y, the scores of a token are

    s = W h + b - m [v = y]        or, with a soft cap,        s = softcap(W h + b) - m [v = y].

A loss reads their softmax p, log Z = logsumexp(s) and s_y, and says what d loss / d s is in the
form weights p - hits [v = y] - uniform. No pass holds more than the scores of one block.

In order: ``functional/softmax_loss.py`` or ``functional/log_probs.py``, ``BlockSoftmaxes``; for
    mixtures, whose tokens have several softmaxes, ``functional/mixture_loss.py``.
"""

from __future__ import annotations

from typing import Iterator, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.functional.blocks import (
    BlockScores,
    Measured,
    filled,
    softmax_and_targets_,
    token_blocks,
    tokens_per_block,
)
from spectral_fairseq.functional.gradient_sums import GradientForm, GradientSums
from spectral_fairseq.functional.softcap import softcap_


class BlockSoftmax(NamedTuple):
    """The scores of one block of tokens; rows behind the first ``real`` only fill it up.

    Attributes:
        part: where the tokens stand in the batch.
        real: their number.
        rows: h, shape (b, d), in the dtype of the products.
        targets: y, shape (b,).
        margin: m, shape (b,), or ``None``.
        softmax: p, shape (b, N).
        log_z: log Z, shape (b,).
        target_scores: s_y, shape (b,).
        score_sum: sum_v s_v of capped scores before the margin, shape (b,); ``None`` where it was
            not asked for.
        slope: ds/dx of the soft cap, shape (b, N); ``None`` without one.
        right: whether the target has the highest score, shape (b,); ``None`` unless measured.
        entropy: of p in nats, shape (b,); ``None`` unless measured.
    """

    part: slice
    real: int
    rows: Tensor
    targets: Tensor
    margin: Optional[Tensor]
    softmax: Tensor
    log_z: Tensor
    target_scores: Tensor
    score_sum: Optional[Tensor]
    slope: Optional[Tensor]
    right: Optional[Tensor]
    entropy: Optional[Tensor]


class BlockSoftmaxes:
    """Computes the softmax of one block of tokens after the other.

    Whoever asks for the next block should have dropped the one before, which is as large.

    Args:
        contexts: h, shape (T, d).
        targets: y, shape (T,).
        matrix: W, shape (N, d).
        bias: b, shape (N,), or ``None``.
        dtype: of the products, from ``blocks.product_dtype``.
        margin: m, shape (T,), or ``None``.
        softcap: of the scores, or ``None``.
        block_elements: number of scores held at a time; ``None`` is ``blocks.elements_for`` the
            device.
        measures: whether entropy and hits are wanted.
        sums_scores: whether the sum of capped scores is wanted.

    Attributes:
        scores: of a block.
        dtype: of the softmax and of all that follows.
    """

    def __init__(
        self,
        contexts: Tensor,
        targets: Tensor,
        matrix: Tensor,
        bias: Optional[Tensor],
        dtype: torch.dtype,
        *,
        margin: Optional[Tensor] = None,
        softcap: Optional[float] = None,
        block_elements: Optional[int] = None,
        measures: bool = False,
        sums_scores: bool = False,
    ) -> None:
        self.contexts, self.targets, self.margin = contexts, targets, margin
        self.softcap, self.measures, self.sums_scores = softcap, measures, sums_scores
        self.scores = BlockScores(matrix, bias, dtype)
        self.dtype = self.scores.accumulation_dtype
        narrow = softcap is None and self.scores.overwrites_products
        self._tokens = tokens_per_block(
            matrix, block_elements, half_precision=narrow, tokens=len(contexts)
        )

    @property
    def is_single(self) -> bool:
        """Whether all tokens are in one block."""
        return len(self.contexts) <= self._tokens

    def parts(self) -> Iterator[Tuple[slice, int]]:
        """Yield the tokens of each block and the number of its rows."""
        return token_blocks(self.contexts.size(0), self._tokens)

    def block(self, part: slice, size: int) -> BlockSoftmax:
        """Return the softmax of the tokens in ``part``, in a block of ``size`` rows."""
        rows = self.scores.rows(self.contexts[part], size)  # [b, d]
        targets = filled(self.targets[part], size)  # [b]
        margin = score_sum = slope = right = entropy = None
        if self.margin is not None:
            margin = filled(self.margin[part].to(self.dtype), size)  # [b]
        measured: Optional[Measured] = [] if self.measures else None
        if self.softcap is None:
            softmax, log_z, target_scores = self.scores.softmax(rows, targets, margin, measured)
        else:
            softmax = self.scores(rows)  # [b, N]
            slope = softcap_(softmax, self.softcap)
            score_sum = softmax.sum(1) if self.sums_scores else None
            log_z, target_scores = softmax_and_targets_(softmax, targets, margin, measured)
        if measured:
            right, entropy = map(torch.cat, zip(*measured))
        return BlockSoftmax(
            part,
            part.stop - part.start,
            rows,
            targets,
            margin,
            softmax,
            log_z,
            target_scores,
            score_sum,
            slope,
            right,
            entropy,
        )

    def add_gradients(
        self,
        sums: GradientSums,
        block: BlockSoftmax,
        weights: Tensor,
        hits: Tensor,
        uniform: Optional[Tensor] = None,
    ) -> None:
        """Add what follows from d loss / d s = weights p - hits [v = y] - uniform.

        The softmax of the block is overwritten. Without a soft cap what is the same for all words
        is left to the caller, who adds it for all tokens together.

        Args:
            sums: of the gradients of contexts, table and bias.
            block: from :meth:`block`.
            weights: shape (b,), 0 for rows that only fill the block up.
            hits: likewise.
            uniform: likewise; it is read with a soft cap alone.
        """
        if block.slope is None:
            form = GradientForm(block.targets, weights, hits)
            sums.add_block(block.part, block.rows, block.softmax, self.scores.table, form)
            return
        gradient = block.softmax.mul_(weights.unsqueeze(1))
        if uniform is not None:
            gradient.sub_(uniform.unsqueeze(1))
        gradient.scatter_add_(1, block.targets.unsqueeze(1), -hits.unsqueeze(1))
        sums.add_block(block.part, block.rows, gradient.mul_(block.slope), self.scores.table)
