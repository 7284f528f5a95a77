"""Penalties on rows; the first is the mean cosine between different words.

Gao, He, Tan, Qin, Wang, Liu: "Representation Degeneration Problem in Training Natural Language
Generation Models", ICLR 2019, https://openreview.net/forum?id=SkEYojRqtm, equation 6 and
appendix B:

    R = 1/N^2 sum_i sum_{j != i} w_i'w_j / (||w_i|| ||w_j||) = (||sum_i w_i/||w_i|| ||^2 - N) / N^2

Flags: ``--cosreg-weight`` 0, ``--weight-norm-weight`` 0, ``--weight-norm-target`` 2,
    ``--weight-norm-target-by-count`` off.
In order: ``methods/penalties.py: output_table``, ``cosine_penalty``, or
    ``methods/penalties.py: output_row_norms``, ``log_count_target``, ``weight_norm_penalty``.
"""

from __future__ import annotations

import math
from typing import Any, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError, DataError, check_enough, plainly
from spectral_fairseq.functional.autograd import differentiable_once
from spectral_fairseq.functional.precision import full_float32, widened
from spectral_fairseq.functional.row_norms import exact_norms


class _SquaredDirectionSum(torch.autograd.Function):
    """S = ||sum_i w_i/||w_i|| ||^2 - sum_i ||w_i/||w_i|| ||^2, over the rows that are not excluded.

    With s = sum_i w_i/||w_i|| the gradient is closed, dS/dw_i = 2 (s - w_i (w_i's)/||w_i||^2) /
    ||w_i||. Each pass reads the table twice, and the gradient is the only tensor of the table's
    size: autograd's own rules would make five.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, excluded: Optional[Tensor]) -> Tensor:
        norms = exact_norms(matrix)  # [n]
        tiny = torch.finfo(matrix.dtype).tiny  # 1/||w_i|| is infinite for shorter rows
        inverse = torch.where(norms >= tiny, norms, torch.full_like(norms, float("inf")))
        inverse.reciprocal_()
        if excluded is not None:
            inverse.index_fill_(0, excluded, 0)
        with full_float32(matrix.device):
            direction_sum = torch.mv(matrix.t(), inverse)  # [d]
        ctx.save_for_backward(matrix, inverse, direction_sum)
        return direction_sum.square().sum() - (inverse > 0).sum()

    @staticmethod
    @differentiable_once("cosine_penalty")
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        matrix, inverse, direction_sum = ctx.saved_tensors
        along = torch.mv(matrix, direction_sum) * inverse  # [n], cosines times ||s||
        # One factor after the other: the square of the inverse of a short row is infinite.
        result = matrix * inverse.unsqueeze(1)  # [n, d]
        result.mul_((-2 * grad * along * inverse).unsqueeze(1))
        return result.addr_(inverse, 2 * grad * direction_sum), None


def cosine_penalty(matrix: Tensor, excluded: Optional[Tensor] = None) -> Tensor:
    """Return R of equation 6, in time O(N d).

    R does not depend on the lengths of the rows, however short; the gradient grows with their
    inverse. A zero row has no direction: its cosines are taken as zero, its gradient is zero, and
    it still counts in N.

    Args:
        matrix: table, shape (n, d), of any floating dtype.
        excluded: distinct indices of the rows to leave out (padding and the like), shape (m,);
            N = n - m.

    Returns:
        Scalar between -1/N and 1 - 1/N, in float32 or wider.

    Raises:
        ConfigurationError: every row is excluded.
    """
    count = _counted(matrix, excluded, "the cosine penalty")
    return _SquaredDirectionSum.apply(widened(matrix), excluded) / count**2


def _counted(matrix: Tensor, excluded: Optional[Tensor], use: str) -> int:
    count = matrix.size(0) - (0 if excluded is None else excluded.numel())
    what = f"row that is neither padding nor a made-up word, for {use}"
    check_enough(count, 1, what, "Check the dictionary.", ConfigurationError)
    return count


# The penalty that pulls the norms of word vectors to a target.
#
# Herold, Gao, Ney: "Improving Neural Language Models with Weight Norm Initialization and
# Regularization", WMT 2018, https://aclanthology.org/W18-6310/, equation 12:
#
#     R = sqrt(sum_j (||W_j|| - nu)^2 + eps)
#
# eps is not in the paper: without it the gradient is undefined where every norm meets its target. A
# target for each word in proportion to its log count is future work in section 7 of the paper.


def weight_norm_penalty(
    norms: Tensor,
    target: Union[float, Tensor],
    excluded: Optional[Tensor] = None,
    eps: float = 1e-8,
) -> Tensor:
    """Return R of equation 12.

    It is the root of a sum over words, not of a mean: it grows with the root of the vocabulary.

    Args:
        norms: ||W_j||, shape (n,), from
            :func:`~spectral_fairseq.functional.row_norms.row_norms` or from a table that
            stores them.
        target: nu, one number or one for each word, shape (n,).
        excluded: indices of the rows to leave out (padding and the like), shape (m,).
        eps: added under the root; R is sqrt(eps) where every norm meets its target.

    Returns:
        Scalar.
    """
    residual = widened(norms) - target  # [n]
    if excluded is not None:
        residual = residual.index_fill(0, excluded, 0.0)
    return (residual.square().sum() + eps).sqrt()


def log_count_target(log_counts: Tensor, mean: float, excluded: Optional[Tensor] = None) -> Tensor:
    """Return a target norm for each word, in proportion to its log count.

    Args:
        log_counts: shape (n,), from
            :func:`~spectral_fairseq.functional.row_penalties.smoothed_log_counts`.
        mean: nu, the mean target of the rows that are not excluded. It has the same meaning as a
            single target.
        excluded: indices of the rows left out of that mean, shape (m,).

    Returns:
        Shape (n,).

    Raises:
        ConfigurationError: the log counts of the remaining rows do not have a positive sum.
    """
    counted = log_counts
    if excluded is not None:
        counted = log_counts.index_fill(0, excluded, 0.0)
    size = log_counts.numel() - (0 if excluded is None else excluded.numel())
    total = float(counted.sum())
    if not (size > 0 and total > 0):
        raise ConfigurationError(
            "log counts with a positive sum, for target norms in proportion to them",
            f"a sum of {total:g} over {size} words",
            "Use smoothed log counts of a dictionary with counts.",
        )
    return log_counts * (mean * size / total)


# Activation regularisation of a recurrent network's outputs.
#
# Merity, McCann, Socher: "Revisiting Activation Regularization for Language RNNs", 2017,
# https://arxiv.org/abs/1708.01009, with the means of squares with which the AWD-LSTM was trained.
# For outputs h_t, t = 1..T, of d_h dimensions,
#
#     AR  = mean(h_t^2),             h after output dropout, over positions, streams and dimensions
#     TAR = mean((h_{t+1} - h_t)^2), h before output dropout, likewise


def activation_regularization(dropped: Tensor, counted: Optional[Tensor] = None) -> Tensor:
    """Return AR, a scalar in float32 or wider.

    Args:
        dropped: h after dropout, shape (B, T, d_h).
        counted: shape (B, T), false at padding; ``None`` counts every position.
    """
    return _mean_of_squares(dropped, counted)


def temporal_activation_regularization(raw: Tensor, counted: Optional[Tensor] = None) -> Tensor:
    """Return TAR, a scalar in float32 or wider; 0 for segments of one position.

    Args:
        raw: h before dropout, shape (B, T, d_h).
        counted: shape (B, T), false at padding; a difference counts where both of its positions
            do.
    """
    if counted is not None:
        counted = counted[:, 1:] & counted[:, :-1]
    return _mean_of_squares(raw[:, 1:] - raw[:, :-1], counted)


def _mean_of_squares(values: Tensor, counted: Optional[Tensor]) -> Tensor:
    squares = widened(values).square()
    if counted is None:
        return squares.sum() / max(squares.numel(), 1)
    positions = counted.sum().clamp(min=1)
    return (squares.sum(-1) * counted).sum() / (positions * values.size(-1))


def not_counted(found: str) -> DataError:
    """The error for counts that do not tell how often words occur."""
    return DataError(
        "a dictionary with word counts, for norms in proportion to their logarithms",
        found,
        "Make the data with fairseq-preprocess, or a dict.txt whose lines are '<symbol> <count>', "
        "or choose an option that needs no counts.",
    )


def fault_of_counts(counts: Sequence[float]) -> str:
    """Why no logarithm of counts tells how often words occur; empty where it does."""
    wrong = next((c for c in counts if not (math.isfinite(c) and c >= 0)), None)
    if wrong is not None:
        return f"a count of {plainly(wrong)}"
    most = max(counts, default=0)
    if most <= 1:
        return f"{len(counts)} words, none with a count above 1"
    alike = len(counts) > 1 and min(counts) == most
    return f"{len(counts)} words, all with the count {most:g}" if alike else ""


def were_counted(counts: Sequence[float]) -> bool:
    """Whether counts tell how often words occur, or only fill a dict.txt.

    The usual recipe for sentencepiece gives every piece the count 100, or another one. Symbols that
    a task adds behind them, such as those of languages, have the count 1.

    Args:
        counts: of all rows in their order; 0 says nothing.
    """
    positive = [count for count in counts if count > 0]
    last = next((place for place in range(len(positive), 0, -1) if positive[place - 1] != 1), 0)
    different = len(set(positive[:last]))
    return different > 1 or (different == 1 and last == 1 and len(positive) > 1)


def smoothed_log_counts(counts: Sequence[float]) -> Tensor:
    """Return log(1 + max(c_k, 1)) of each count c_k.

    Plain log c is zero for words seen once, which would give them zero vectors, and minus infinity
    for words never seen: fairseq's special symbols and ``madeupword`` fillers, and words that
    another corpus does not have. With this formula a word never seen counts like one seen once,
    every value is positive, and frequent words are hardly affected (at c = 100 log c changes by
    0.2 %).

    Args:
        counts: one for each row of the dictionary, n numbers.

    Returns:
        Shape (n,), float32, at least log 2.

    Raises:
        DataError: a count is negative or not finite, no word was counted more than once, or all
            as often.
    """
    fault = fault_of_counts(counts)
    if fault:
        raise not_counted(fault)
    return torch.as_tensor(counts, dtype=torch.float64, device="cpu").clamp(min=1).log1p().float()
