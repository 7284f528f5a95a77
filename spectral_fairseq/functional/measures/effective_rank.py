"""The effective rank: over how many directions a spectrum is spread.

Roy, Vetterli: "The Effective Rank: A Measure of Effective Dimensionality", EUSIPCO 2007,
https://www.eurasip.org/Proceedings/Eusipco/Eusipco2007/Papers/a5p-h05.pdf:

    erank = exp(-sum_k p_k log p_k),    p_k = sigma_k / sum_j sigma_j
"""

from __future__ import annotations

import torch
from torch import Tensor


def effective_rank(sigma: Tensor) -> float:
    """Return the effective rank.

    Args:
        sigma: singular values, shape (d,), >= 0, in any order.

    Returns:
        A number between 1 (a single direction) and d (all singular values equal); 0 for a zero
        table.
    """
    total = sigma.double().sum()
    if total <= 0:
        return 0.0
    share = sigma.double() / total
    return float(torch.special.entr(share).sum().exp())
