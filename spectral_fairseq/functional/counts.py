"""Logarithms of word counts, smoothed for words never counted."""

from __future__ import annotations

import math
from typing import Sequence

import torch
from torch import Tensor

from spectral_fairseq.errors import DataError


def smoothed_log_counts(counts: Sequence[float]) -> Tensor:
    """log(1 + max(c_k, 1)) of each count c_k.

    Plain log c is zero for words seen once, which would give them vectors of no length, and
    minus infinity for words never seen: fairseq's special symbols and ``madeupword`` fillers,
    and words of another corpus where the dictionary was given. Here a word never seen is worth
    one seen once, every value is positive, and frequent words keep theirs (at c = 100 log c
    moves by 0.2 %).

    Args:
        counts: one for each row of the dictionary, n of them.

    Returns:
        Shape (n,), float32, at least log 2.

    Raises:
        DataError: a count that is negative or not finite, or counts that say nothing because
            no word was counted more than once.
    """
    wrong = next((c for c in counts if not (math.isfinite(c) and c >= 0)), None)
    if wrong is not None:
        raise DataError(
            "finite word counts >= 0 in the dictionary",
            f"a count of {wrong!r}",
            "Make the dictionary anew with fairseq-preprocess.",
        )
    if max(counts, default=0) <= 1:
        raise DataError(
            "a dictionary with word counts, for norms in proportion to their logarithms",
            f"{len(counts)} symbols, none with a count above 1",
            "Make dict.txt with fairseq-preprocess from the training text (each line is "
            "'<symbol> <count>'), or choose an option that needs no counts.",
        )
    return torch.tensor(counts, dtype=torch.float64).clamp(min=1).log1p().float()
