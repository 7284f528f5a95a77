"""The squared length of a table's mean vector: output embedding centering as a penalty (mu-loss).

Stollenwerk, Lokrantz, Hertzberg: "Output Embedding Centering for Stable LLM Pretraining", 2026,
https://arxiv.org/abs/2601.02031:

    R = mu'mu,   mu = 1/N sum_i w_i

Adding one vector to all output vectors changes no softmax, so the likelihood of an untied output
table has no opinion about mu, which is free to grow.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError


def mean_vector_penalty(matrix: Tensor, excluded: Optional[Tensor] = None) -> Tensor:
    """R = ||1/N sum_i w_i||^2, in time O(N d).

    Args:
        matrix: table, shape (n, d).
        excluded: distinct indices of the rows to leave out (padding and the like), shape (m,);
            N = n - m.

    Returns:
        Scalar >= 0.

    Raises:
        ConfigurationError: every row is excluded.
    """
    dtype = torch.promote_types(matrix.dtype, torch.float32)
    total, count = matrix.sum(0, dtype=dtype), matrix.size(0)
    if excluded is not None:
        total = total - matrix.index_select(0, excluded).sum(0, dtype=dtype)
        count -= excluded.numel()
    if count < 1:
        raise ConfigurationError(
            "a table with at least one row that is not excluded, for the mean vector",
            f"{matrix.size(0)} rows, all of them padding or made-up words",
            "Check the dictionary.",
        )
    return (total / count).square().sum()
