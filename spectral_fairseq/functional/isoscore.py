"""IsoScore: how uniformly a cloud of points uses the dimensions of its space.

Rudman, Gillman, Rayne, Eickhoff: "IsoScore: Measuring the Uniformity of Embedding Space
Utilization", Findings of ACL 2022, https://aclanthology.org/2022.findings-acl.262/, section 4.
With lambda the n eigenvalues of the covariance:

    lambda^ = sqrt(n) lambda / ||lambda||              normalised
    delta   = ||lambda^ - 1|| / sqrt(2 (n - sqrt n))   isotropy defect, 0 to 1
    phi     = (n - delta^2 (n - sqrt n))^2 / n^2       share of dimensions in use, 1/n to 1
    score   = (n phi - 1) / (n - 1)

The score is 1 for a covariance that is a multiple of the identity and 0 where one direction has
all the variance. It depends neither on rotation nor on scale. Because the mean is subtracted, a
narrow cone far from the origin can still score high; the mean cosine shows that case.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectral_fairseq.errors import check_enough
from spectral_fairseq.functional.spectra import require_finite


def covariance_from_gram(gram: Tensor, row_sum: Tensor, count: int) -> Tensor:
    """Return the sample covariance (W'W - N mu mu') / (N - 1), without a pass over the rows.

    Args:
        gram: W'W, shape (d, d).
        row_sum: sum_i w_i = N mu, shape (d,).
        count: N, at least 2.

    Returns:
        Shape (d, d), float64.

    Raises:
        DataError: fewer than two rows.
    """
    check_enough(count, 2, "rows for a covariance", "Pass the whole table.")
    mean = row_sum.double() / count
    return (gram.double() - count * torch.outer(mean, mean)) / (count - 1)


def isoscore(covariance: Tensor) -> float:
    """Return the score of a cloud of points with this covariance.

    Args:
        covariance: shape (n, n), n >= 2.

    Returns:
        Between 0 and 1; 0 where all points coincide.

    Raises:
        DataError: fewer than two dimensions, or an entry that is infinite or not a number.
    """
    dim = covariance.size(0)
    check_enough(dim, 2, "dimensions of the points for IsoScore", "Leave it out.")
    require_finite(covariance)
    return isoscore_of_variances(torch.linalg.eigvalsh(covariance.double()).clamp(min=0))


def isoscore_of_variances(values: Tensor) -> float:
    """Return the score from the eigenvalues of the covariance, shape (n,), n >= 2, all >= 0."""
    dim = values.numel()
    largest = float(values.max())
    if largest == 0:
        return 0.0
    values = values / largest  # whose squares are no smaller than the numbers of the dtype
    length = float(values.norm())
    root = dim**0.5
    squared_defect = float((root * values / length - 1).square().sum()) / (2 * (dim - root))
    used = (dim - squared_defect * (dim - root)) ** 2 / dim**2
    return min(max((dim * used - 1) / (dim - 1), 0.0), 1.0)
