"""The penalty that pulls the norms of word vectors to a target.

Herold, Gao, Ney: "Improving Neural Language Models with Weight Norm Initialization and
Regularization", WMT 2018, https://aclanthology.org/W18-6310/, equation 12:

    R = sqrt(sum_j (||W_j|| - nu)^2 + eps)

eps is not in the paper: without it the gradient is undefined where every norm meets its target. A
target for each word in proportion to its log count is future work in section 7 of the paper.

Flags: ``--weight-norm-weight`` 0, ``--weight-norm-target`` 2,
    ``--weight-norm-target-by-count`` off.
In order: ``methods/penalties.py: output_row_norms``, ``log_count_target``,
    ``weight_norm_penalty``.
"""

from __future__ import annotations

import math
from typing import Optional, Sequence, Union

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError, DataError, plainly
from spectral_fairseq.functional.precision import widened


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
            :func:`~spectral_fairseq.functional.weight_norm_penalty.smoothed_log_counts`.
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
