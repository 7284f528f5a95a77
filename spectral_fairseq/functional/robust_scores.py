"""How far values lie from the middle of their sample, in a unit that outliers cannot change.

    score_i = (x_i - median(x)) / (1.4826 median |x - median(x)|)

The factor makes the unit the standard deviation of a normal sample. :data:`OUTLYING` is 5: a
normal value lies that far on one side with probability 2.9e-7, so of a million none is expected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectral_fairseq.functional.row_norms import SMALLEST_SHARE

OUTLYING = 5.0


def robust_scores(values: Tensor) -> Tensor:
    """Return the scores, shape (n,), float64, of ``values``, shape (n,).

    All are zero where at least half of the values are equal, which leaves no unit.
    """
    away = values.double() - values.double().median()
    unit = 1.4826 * float(away.abs().median())
    return away / unit if unit > 0 else torch.zeros_like(away)


def zero_rows(norms: Tensor) -> Tensor:
    """Return which rows count as zero beside the longest, shape (n,), bool, from their norms."""
    return norms <= SMALLEST_SHARE * norms.max() if norms.numel() else norms <= 0


def length_scores(norms: Tensor) -> Tensor:
    """Return :func:`robust_scores` of log ||w_i||, shape (n,), float64; zero rows as short ones."""
    wide = norms.double()
    longest = float(wide.max()) if wide.numel() else 0.0
    if longest == 0:
        return torch.zeros_like(wide)
    return robust_scores((wide / longest).clamp(min=SMALLEST_SHARE).log())
