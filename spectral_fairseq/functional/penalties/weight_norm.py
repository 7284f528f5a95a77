"""The lengths of word vectors, and the penalty that gathers them round a target.

Herold, Gao, Ney: "Improving Neural Language Models with Weight Norm Initialization and
Regularization", WMT 2018, equation 12:

    R = sqrt(sum_j (||W_j|| - nu)^2 + eps)

eps is not in the paper: without it the gradient is not defined where every norm meets its target.
A target for each word, proportional to its log count, is what the paper's section 7 proposes to
try next.
"""

from __future__ import annotations

from typing import Any, Optional, Union

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spectral_fairseq.errors import ConfigurationError


class _RowNorms(torch.autograd.Function):
    """||w_i||, whose gradient w_i/||w_i|| is zero for a zero row.

    One product backward, where autograd's own rule adds a masked pass over the table.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(matrix, dim=-1)
        ctx.save_for_backward(matrix, norms)
        return norms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        matrix, norms = ctx.saved_tensors
        ratio = torch.where(norms > 0, grad / norms, torch.zeros_like(grad))
        return matrix * ratio.unsqueeze(-1)


def row_norms(matrix: Tensor) -> Tensor:
    """Euclidean norms of the last dimension, (*, d) to (*); a zero row's gradient is zero."""
    return _RowNorms.apply(matrix)


def weight_norm_penalty(
    norms: Tensor,
    target: Union[float, Tensor],
    excluded: Optional[Tensor] = None,
    eps: float = 1e-8,
) -> Tensor:
    """R of equation 12.

    It is the root of a sum over words, not of a mean: it grows with the root of the dictionary.

    Args:
        norms: ||W_j||, shape (n,), from :func:`row_norms` or a table that stores them.
        target: nu, one number or one for each word, shape (n,).
        excluded: indices of the rows left out (padding and the like), shape (m,).
        eps: added under the root; R is sqrt(eps) where every norm meets its target.

    Returns:
        Scalar.
    """
    residual = norms - target  # [n]
    if excluded is not None:
        residual = residual.index_fill(0, excluded, 0.0)
    return (residual.square().sum() + eps).sqrt()


def log_count_target(log_counts: Tensor, mean: float, excluded: Optional[Tensor] = None) -> Tensor:
    """A target norm for each word, proportional to its log count.

    Args:
        log_counts: of :func:`spectral_fairseq.functional.counts.smoothed_log_counts`, shape (n,).
        mean: nu, the mean target of the rows that count, so that nu means what it means for
            one target.
        excluded: indices of the rows left out of that mean, shape (m,).

    Returns:
        Shape (n,).

    Raises:
        ConfigurationError: the log counts of the rows that count add up to nothing.
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
