"""The penalty that pulls the norms of word vectors to a target.

Herold, Gao, Ney: "Improving Neural Language Models with Weight Norm Initialization and
Regularization", WMT 2018, https://aclanthology.org/W18-6310/, equation 12:

    R = sqrt(sum_j (||W_j|| - nu)^2 + eps)

eps is not in the paper: without it the gradient is undefined where every norm meets its target. A
target for each word in proportion to its log count is future work in section 7 of the paper.

Flags: ``--weight-norm-weight`` 0, ``--weight-norm-target`` 2,
    ``--weight-norm-target-by-count`` off.
In order: ``log_count_target``, ``methods/penalties.py: output_row_norms``,
    ``weight_norm_penalty``.
"""

from __future__ import annotations

from typing import Optional, Union

from torch import Tensor

from spectral_fairseq.errors import ConfigurationError, check_shape
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

    Raises:
        ConfigurationError: targets of another shape than the norms.
    """
    if isinstance(target, Tensor) and target.dim():
        check_shape("`target`", target, norms.shape, "Give one number, or one for each word.")
    residual = widened(norms) - target  # [n]
    if excluded is not None:
        residual = residual.index_fill(0, excluded, 0.0)
    return (residual.square().sum() + eps).sqrt()


def log_count_target(log_counts: Tensor, mean: float, excluded: Optional[Tensor] = None) -> Tensor:
    """Return a target norm for each word, in proportion to its log count.

    Args:
        log_counts: shape (n,), from
            :func:`~spectral_fairseq.functional.word_counts.smoothed_log_counts`.
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
