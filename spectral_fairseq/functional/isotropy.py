"""Isotropy of a table by its partition function: Z(a), I1 and I2.

Wang, Huang, Huang, Hu, Wang, Gu, ICLR 2020, section 5.1,
https://openreview.net/forum?id=ByxY8CNtvr, after Arora, Li, Liang, Ma, Risteski, TACL 2016,
https://aclanthology.org/Q16-1028/, and Mu, Viswanath, ICLR 2018,
https://openreview.net/forum?id=HkuGJ3kCb:

    Z(a) = sum_i exp(<w_i, a>),   a in E, the eigenvectors of W'W
    I1 = min_E Z / max_E Z,       I2 = sqrt(sum_E (Z - mean Z)^2 / |E|) / mean Z

I1 = 1 and I2 = 0 for a perfectly isotropic table.

Note [Sign and scale of I1 and I2]
----------------------------------
The sign of an eigenvector is arbitrary, Z(a) and Z(-a) differ, and Z grows with the length of the
rows: without a convention I1 and I2 are not defined. This package uses:

* Sign: E holds both a and -a, 2d directions, so that nothing depends on the eigensolver.
* Scale: W as it is, as in the paper. A table at half the scale has a larger I1, so only tables of
  similar row length can be compared; the other natural choice is to divide W by the root mean
  square of the lengths of its rows.

A repeated eigenvalue leaves its eigenvectors undetermined within their plane; the definition has
that gap.

The caller leaves out rows that stand for no word (padding, ``madeupword``). These are measures,
not penalties: they are computed in float64 over blocks of rows, so that no second copy of a large
table is made, and they have no gradient.

Note [Z in float32]
-------------------
:func:`log_partition` can form its products and exponentials in float32, four times as fast, and
sum the blocks in float64. The rounding of an exponent is at most ||w_i|| eps, has either sign and
averages out over the rows: with rows no longer than :data:`NARROW_ROW_NORM`, I1 and I2 keep five
digits in the worst case and usually seven. This is meant for samples, whose own scatter is far
larger. The eigenvectors stay float64, because small errors can turn them within a plane of close
eigenvalues.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectral_fairseq.functional.products import matmul_transposed
from spectral_fairseq.functional.progress import ProgressCallback, ignore_progress
from spectral_fairseq.functional.row_blocks import (
    BLOCK_ROWS,
    cached_rows,
    checked_table,
    row_blocks,
)

# Rows up to this norm may be measured by Note [Z in float32].
NARROW_ROW_NORM = 64.0


# The exponential of this number, its inverse, and sums of either over a block are far from the
# limits of the dtype.
_SAFE_EXPONENT = {torch.float64: 300.0, torch.float32: 70.0}


@torch.no_grad()
def log_partition(
    matrix: Tensor,
    directions: Tensor,
    *,
    scale: float = 1.0,
    block_rows: int = BLOCK_ROWS,
    dtype: torch.dtype = torch.float64,
    progress: ProgressCallback = ignore_progress,
) -> Tensor:
    """Return log Z(a) and log Z(-a) for each direction, in logarithms to avoid overflow.

    Args:
        matrix: W, shape (N, d).
        directions: a, unit vectors as columns, shape (d, m), such as V of
            :func:`~spectral_fairseq.functional.spectra.right_singular_system_of_gram`.
        scale: factor on W; see Note [Sign and scale of I1 and I2].
        block_rows: number of rows that are converted to ``dtype`` at a time.
        dtype: of products and exponentials, float64 or float32; see Note [Z in float32].
        progress: called after each block with its number of rows.

    Returns:
        Shape (2, m), float64. Row 0 belongs to the sign of each direction for which
        sum_i <w_i, a> >= 0, row 1 to the opposite sign.

    Raises:
        DataError: ``matrix`` is not a table.
    """
    matrix = checked_table(matrix)
    axes = directions.to(dtype).t().contiguous()  # [m, d]
    total = axes.new_zeros(axes.size(0), dtype=torch.float64)  # [m], sum_i <w_i, a>
    log_z = total.new_full((2, axes.size(0)), float("-inf"))
    part_rows = min(cached_rows(axes.size(0)), block_rows)
    powers = axes.new_empty((part_rows, axes.size(0)))
    for block in row_blocks(matrix, block_rows, dtype):
        products = matmul_transposed(block, axes)  # [b, m]
        largest = max(float(bound.abs()) for bound in torch.aminmax(products))
        is_safe = largest * abs(scale) < _SAFE_EXPONENT[dtype]
        both = torch.zeros_like(log_z)
        for part in products.split(part_rows):
            total += part.sum(0)
            if is_safe:  # both signs from one exponential
                z = torch.mul(part, scale, out=powers[: len(part)]).exp_()  # [p, m]
                both[0] += z.sum(0)
                both[1] += z.reciprocal_().sum(0)
        if is_safe:
            both.log_()
        else:
            scaled = scale * products.double()
            both = torch.stack([torch.logsumexp(scaled, 0), torch.logsumexp(-scaled, 0)])
        torch.logaddexp(log_z, both, out=log_z)
        progress(block.size(0))
    return torch.where(total >= 0, log_z, log_z.flip(0))


def centred_log_partition(log_z: Tensor, mean: Tensor, directions: Tensor, scale: float) -> Tensor:
    """Return :func:`log_partition` of the rows minus their mean, without another pass over them.

    Z of the centred rows is Z(a) exp(-<mean, a>).

    Args:
        log_z: of :func:`log_partition` for W as it is, shape (2, m).
        mean: of the rows of W, shape (d,).
        directions: the same unit vectors, shape (d, m).
        scale: the same factor on W.
    """
    along = scale * (mean.double() @ directions.double()).abs()  # [m], of the sign in row 0
    return log_z - torch.stack([along, -along])


def isotropy_i1(log_z: Tensor) -> Tensor:
    """Return I1 = min Z / max Z over all entries of ``log_z`` (any shape), a scalar in [0, 1]."""
    return (log_z.min() - log_z.max()).exp()


def isotropy_i2(log_z: Tensor) -> Tensor:
    """Return I2 = std Z / mean Z over all entries of ``log_z`` (any shape), a scalar.

    The variance is divided by the number of entries, |E|.
    """
    z = (log_z - log_z.max()).exp()  # the common factor cancels in the ratio
    return z.std(unbiased=False) / z.mean()
