"""How often words occur in the training text, and the logarithms of these counts.

In order: ``checkpoints/dictionary.py: WordList`` or ``plugin/counts.py``, ``were_counted``,
    ``smoothed_log_counts``.
"""

from __future__ import annotations

import math
from typing import Sequence

import torch
from torch import Tensor

from spectral_fairseq.errors import DataError, plainly


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
