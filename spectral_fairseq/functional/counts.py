"""Logarithms of word counts, smoothed for words never counted."""

from __future__ import annotations

import math
from typing import Sequence

import torch
from torch import Tensor

from spectral_fairseq.errors import DataError


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
        DataError: a count is negative or not finite, or no word was counted more than once.
    """
    wrong = next((c for c in counts if not (math.isfinite(c) and c >= 0)), None)
    if wrong is not None:
        raise DataError(
            "finite word counts >= 0 in the dictionary",
            f"a count of {wrong!r}",
            "Create the dictionary again with fairseq-preprocess.",
        )
    if max(counts, default=0) <= 1:
        raise DataError(
            "a dictionary with word counts, for norms in proportion to their logarithms",
            f"{len(counts)} symbols, none with a count above 1",
            "Create dict.txt with fairseq-preprocess from the training text (each line is "
            "'<symbol> <count>'), or choose an option that needs no counts.",
        )
    return torch.tensor(counts, dtype=torch.float64).clamp(min=1).log1p().float()
