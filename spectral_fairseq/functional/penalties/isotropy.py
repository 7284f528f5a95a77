"""One minus a table's IsoScore: isotropy as a penalty, or, with a negative weight, anisotropy.

Rudman and Eickhoff: "Stable Anisotropic Regularization", ICLR 2024,
https://arxiv.org/abs/2305.19358, add lambda (1 - IsoScore*) of hidden states to the loss and find
that lambda < 0, which makes them less isotropic, helps most tasks. Here it is a penalty on a table.
IsoScore* shrinks the covariance of a small batch towards one estimated from more data; a table is
all the data that there is, and without shrinkage IsoScore* is IsoScore.

The definition (:mod:`spectral_fairseq.functional.measures.isoscore`) normalises the eigenvalues of
the covariance C. Inserted into each other its formulas need none of them:

    IsoScore = ((tr C)^2 / ||C||_F^2 - 1) / (d - 1)
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.linalg.gram import gram


def isoscore_penalty(matrix: Tensor, excluded: Optional[Tensor] = None) -> Tensor:
    """R = 1 - IsoScore of the rows, in time O(N d^2), differentiable once.

    Args:
        matrix: table, shape (n, d), d >= 2, of any floating dtype.
        excluded: distinct indices of the rows to leave out (padding and the like), shape (m,);
            N = n - m >= 2.

    Returns:
        Scalar from 0, where the covariance is a multiple of the identity, to 1, where all variance
        has one direction. R is 1, with a gradient of zero, where all rows are equal.

    Raises:
        ConfigurationError: fewer than two rows or two dimensions.
    """
    count = matrix.size(0) - (0 if excluded is None else excluded.numel())
    dim = matrix.size(1)
    if count < 2 or dim < 2:
        raise ConfigurationError(
            "a table with at least two words and two dimensions for IsoScore",
            f"{count} words, padding and made-up rows left out, and {dim} dimensions",
            "Drop the penalty.",
        )
    # The mean is subtracted from the rows and not from the Gram matrix, where it would cancel
    # digits of float32. A constant mean has the right gradient: sum_i (w_i - mu) is zero.
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    with torch.no_grad():
        mean = matrix.sum(0)
        if excluded is not None:
            mean -= matrix.index_select(0, excluded).sum(0)
        mean /= count
    scatter = gram(matrix - mean, excluded)  # [d, d], proportional to C
    trace = scatter.diagonal().sum()
    squares = scatter.square().sum().clamp(min=torch.finfo(scatter.dtype).tiny)
    return 1 - (trace.square() / squares - 1).clamp(min=0) / (dim - 1)
