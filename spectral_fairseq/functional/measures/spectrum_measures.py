"""Measures of a table that follow from its singular values, for training logs and reports."""

from __future__ import annotations

from typing import Dict

from torch import Tensor

from spectral_fairseq.functional.measures.effective_rank import effective_rank
from spectral_fairseq.functional.measures.stable_rank import share_of_first, stable_rank


def spectrum_measures(sigma: Tensor) -> Dict[str, float]:
    """Return numbers that summarise a spectrum, under the names that logs and reports use.

    Args:
        sigma: singular values, shape (d,), >= 0, in any order.

    Returns:
        ``sigma_max``, ``sigma_2`` (the second; 0 where d = 1), ``sigma_median``, ``sigma_min``,
        ``frobenius_norm``, ``share_of_first``, ``effective_rank``, ``stable_rank``; finite floats.
    """
    ordered = sigma.detach().double().sort(descending=True).values
    return {
        "sigma_max": float(ordered[0]),
        "sigma_2": float(ordered[1]) if ordered.numel() > 1 else 0.0,
        "sigma_median": float(ordered.median()),
        "sigma_min": float(ordered[-1]),
        "frobenius_norm": float(ordered.norm()),
        "share_of_first": share_of_first(ordered),
        "effective_rank": effective_rank(ordered),
        "stable_rank": stable_rank(ordered),
    }
