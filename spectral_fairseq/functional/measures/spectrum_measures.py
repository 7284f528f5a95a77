"""The measures of a table that one d x d Gram matrix gives: cheap enough for every validation.

Training logs and reports take them from here, under these names.
"""

from __future__ import annotations

from typing import Dict

import torch
from torch import Tensor

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.measures.isotropy import effective_rank
from spectral_fairseq.functional.measures.stable_rank import share_of_first, stable_rank


def singular_values_of_gram(gram: Tensor, rows: int) -> Tensor:
    """sqrt of the eigenvalues of W'W, largest first, float64, shape (d,); roundoff becomes zero.

    Args:
        gram: W'W, shape (d, d), of any floating type; its roundoff is that type's.
        rows: N.

    Raises:
        DataError: entries that are infinite or not a number.
    """
    if not torch.isfinite(gram).all():
        raise DataError(
            "a Gram matrix of finite numbers", "infinity or NaN among its entries",
            "Training diverged: lower the learning rate, or take an earlier checkpoint.",
        )  # fmt: skip
    values = torch.linalg.eigvalsh(gram.detach().double()).flip(0)
    eps = torch.finfo(gram.dtype).eps
    noise = eps * max(rows, gram.size(0)) * values[0].clamp(min=0)
    return torch.where(values > noise, values, torch.zeros_like(values)).sqrt()


def spectrum_measures(sigma: Tensor) -> Dict[str, float]:
    """Numbers that sum a spectrum up.

    Args:
        sigma: singular values, shape (d,), >= 0, any order.

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
