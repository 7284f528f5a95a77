"""log Z of a very large table from a part of its rows, to a stated accuracy.

Z(a) / N is a mean over the rows. Its expansion to the second order needs the mean m of the rows and
the length |Wa| alone:

    Z(a) / N = 1 + <m, a> + |Wa|^2 / 2N + mean_i r(<w_i, a>),    r(x) = exp(x) - 1 - x - x^2 / 2.

The remainder r is small and varies little wherever no direction dominates, so that a part of the
rows determines its mean: the longest rows, each of which may matter by itself, and a random sample
of the others. Directions in which the standard error of log Z is above :data:`TOLERANCE` are
computed from all rows after all.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.functional.linalg.products import matmul_transposed
from spectral_fairseq.functional.linalg.row_blocks import cached_rows, checked_table, row_blocks
from spectral_fairseq.functional.measures.partition_function import log_partitions
from spectral_fairseq.functional.progress_callback import ProgressCallback, ignore_progress
from spectral_fairseq.functional.sample_rows import sample_rows

SAMPLED_ROWS = 1 << 15
TOLERANCE = 1e-6
# One core does so many in some ten seconds in float32.
_CHEAP_PRODUCTS = 1 << 39


class RowMoments(NamedTuple):
    """What is known of all rows of W.

    Attributes:
        mean: m, shape (d,).
        lengths: |Wa| of each direction, shape (k,).
        norms: of the rows, shape (N,).
    """

    mean: Tensor
    lengths: Tensor
    norms: Tensor


def is_worth_sampling(rows: int, dim: int) -> bool:
    """Whether reading all rows of a table of this shape, for d directions, would take long."""
    return rows >= 2 * SAMPLED_ROWS and rows * dim * dim > _CHEAP_PRODUCTS


@torch.no_grad()
def sampled_log_partitions(
    matrix: Tensor,
    directions: Tensor,
    scales: Sequence[float],
    moments: RowMoments,
    *,
    rows: int = SAMPLED_ROWS,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    progress: ProgressCallback = ignore_progress,
) -> Tensor:
    """Return :func:`~.partition_function.log_partitions`, of which most is estimated.

    Args:
        matrix: W, shape (N, d).
        directions: unit vectors as columns, shape (d, k).
        scales: s factors on W.
        moments: of W.
        rows: that are read for the estimate, at least 8 and fewer than N.
        seed: of the sample.
        dtype: of the products, and of the exponentials of directions that need all rows.
        progress: called after each block with the share of N that it stands for.

    Returns:
        Shape (s, 2, k), float64, with the rows of :func:`~.partition_function.log_partition`.

    Raises:
        DataError: ``matrix`` is not a table.
    """
    matrix = checked_table(matrix)
    count = matrix.size(0)
    longest = moments.norms.topk(rows // 4).indices
    is_other = longest.new_ones(count, dtype=torch.bool)
    is_other[longest] = False
    others = is_other.nonzero().squeeze(1)
    drawn = others[sample_rows(len(others), rows - len(longest), seed)]
    axes = directions.to(dtype).t().contiguous()  # [k, d]

    def step(done: int) -> None:
        progress(done * count // rows)

    exact, _ = _remainder_sums(matrix[longest], axes, scales, step)
    total, squares = _remainder_sums(matrix[drawn], axes, scales, step)
    estimate = total / len(drawn)
    variance = (squares / len(drawn) - estimate.square()).clamp(min=0)
    share = len(others) / count
    error = share * (variance / (len(drawn) - 1)).sqrt()

    scale = axes.new_tensor(scales, dtype=torch.float64).view(-1, 1, 1)
    along = moments.mean.double() @ directions.double()  # [k]
    first = scale * torch.stack([along, -along])  # [s, 2, k]
    second = (scale * moments.lengths).square() / (2 * count)
    z = 1 + first + second + exact / count + share * estimate
    log_z = z.log() + math.log(count)
    log_z = torch.where(along >= 0, log_z, log_z.flip(1))
    # Written so that what is not a number counts as inexact.
    inexact = ~(error <= TOLERANCE * z).all(0).all(0)
    if inexact.any():
        log_z[..., inexact] = log_partitions(matrix, directions[:, inexact], scales, dtype=dtype)
    return log_z


def _remainder_sums(
    matrix: Tensor, axes: Tensor, scales: Sequence[float], progress: ProgressCallback
) -> Tuple[Tensor, Tensor]:
    """Sums over the rows of r and of its square, for either sign; each of shape (s, 2, k)."""
    sums = axes.new_zeros((len(scales), 2, axes.size(0)), dtype=torch.float64)
    squares = torch.zeros_like(sums)
    for block in row_blocks(matrix, dtype=axes.dtype):
        for part in matmul_transposed(block, axes).split(cached_rows(axes.size(0))):
            for index, scale in enumerate(scales):
                x = part.double() * scale  # [p, k]
                power = x.exp()
                even = x.square().mul_(0.5).add_(1)
                for sign, z in enumerate((power, power.reciprocal())):
                    r = z.sub_(even).add_(x, alpha=2 * sign - 1)
                    sums[index, sign] += r.sum(0)
                    squares[index, sign] += r.square_().sum(0)
        progress(block.size(0))
    return sums, squares
