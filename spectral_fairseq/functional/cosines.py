"""How evenly the rows of a table use the directions of its space: cosines, I1 and I2, IsoScore.

Each measure has its paper and its formula before it. The caller leaves out rows that stand for no
word (padding, ``madeupword``).
"""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import check_enough
from spectral_fairseq.functional.products import matmul_transposed
from spectral_fairseq.functional.progress import ProgressCallback, ignore_progress
from spectral_fairseq.functional.row_blocks import (
    BLOCK_ROWS,
    cached_rows,
    checked_table,
    row_blocks,
)
from spectral_fairseq.functional.row_norms import rows_from, rows_with_norms, unit_rows
from spectral_fairseq.functional.spectra import require_finite

# The mean cosine between different words, the measure of representation degeneration.
#
# Gao, He, Tan, Qin, Wang, Liu: "Representation Degeneration Problem in Training Natural Language
# Generation Models", ICLR 2019, https://openreview.net/forum?id=SkEYojRqtm. With u_i = (w_i - c) /
# ||w_i - c||, where c is zero or the mean of the rows, over the N words of a group:
#
#     mean cosine = (||sum_i u_i||^2 - sum_i ||u_i||^2) / (N (N - 1))
#
# A vector that is added to all rows of an output table changes no probability, but it changes the
# cosines. Those of the centred rows are what the likelihood can see.


@torch.no_grad()
def mean_cosine(
    matrix: Tensor, excluded: Optional[Tensor] = None, *, centre: Optional[Tensor] = None
) -> float:
    """Return the mean cosine over the N (N - 1) ordered pairs of different rows.

    The cosines of a zero row are taken as 0. The penalty of
    :mod:`spectral_fairseq.functional.row_penalties` divides the same sum by N^2.

    Args:
        matrix: W, shape (n, d).
        excluded: distinct indices of the rows to leave out (padding and the like), shape (m,);
            N = n - m >= 2.
        centre: c, shape (d,), which is subtracted from every row; nothing if not given.

    Raises:
        DataError: fewer than two rows remain.
    """
    matrix = checked_table(matrix)
    count = matrix.size(0) - (0 if excluded is None else excluded.numel())
    check_enough(count, 2, "rows for a mean cosine", "Pass the whole table.")
    group = torch.zeros(matrix.size(0), dtype=torch.long, device=matrix.device)
    if excluded is not None:
        group[excluded] = 1
    return mean_cosines(matrix, group, 2, centre=centre)[0]


@torch.no_grad()
def mean_cosines(
    matrix: Tensor,
    group: Tensor,
    groups: int,
    *,
    centre: Optional[Tensor] = None,
    block_rows: Optional[int] = None,
) -> List[float]:
    """Return the mean cosine between different rows of the same group, for each group.

    The rows are read once, block by block.

    Args:
        matrix: W, shape (n, d), of any floating dtype.
        group: of each row, from 0 to ``groups`` - 1, shape (n,).
        groups: their number.
        centre: c, shape (d,), which is subtracted from every row; nothing if not given.
        block_rows: rows that are converted at a time; as many as stay in the cache if not given.

    Returns:
        One number for each group; NaN for a group of fewer than two rows.

    Raises:
        DataError: ``matrix`` is not a table.
    """
    matrix = checked_table(matrix)
    dtype = torch.float64 if matrix.dtype == torch.float64 else torch.float32
    total = matrix.new_zeros((groups, matrix.size(1)), dtype=torch.float64)
    with_direction = total.new_zeros(groups)  # rows that are not zero
    block_rows = block_rows or cached_rows(matrix.size(1))
    for block, part in zip(row_blocks(matrix, block_rows, dtype), group.split(block_rows)):
        moved, norms, _ = rows_with_norms(block if centre is None else rows_from(block, centre))
        has_direction = norms > 0  # [b]
        inverse = torch.where(has_direction, 1 / norms, torch.zeros_like(norms))
        # One product adds the unit vectors of each group, without storing them.
        weights = inverse.new_zeros(groups, len(part)).scatter_(0, part[None], inverse[None])
        total += weights @ moved
        with_direction.index_add_(0, part, has_direction.double())
    count = group.bincount(minlength=groups).double()
    mean = (total.square().sum(1) - with_direction) / (count * (count - 1))
    return torch.where(count > 1, mean, torch.full_like(mean, float("nan"))).tolist()


# The distribution of the cosines between different words.
#
# Their mean over all words takes only time O(N d) (see above). The distribution needs all
# N^2 pairs, so callers pass a sample of the words of a large table.


@torch.no_grad()
def cosine_histogram(
    matrix: Tensor, bins: int = 200, *, block_rows: int = 1024
) -> Tuple[List[float], List[int]]:
    """Count the cosines of all unordered pairs of different rows in ``bins`` equal bins of [-1, 1].

    Args:
        matrix: W, shape (N, d), N >= 2. The cosines of a zero row are taken as 0.
        bins: number of bins.
        block_rows: number of rows that are multiplied with all others at a time.

    Returns:
        The bins + 1 edges, and the counts, which add up to N (N - 1) / 2.

    Raises:
        DataError: fewer than two rows.
    """
    check_enough(matrix.size(0), 2, "rows for a distribution of cosines", "Pass the whole table.")
    units = unit_rows(matrix)
    # torch.histc counts in float32, which is exact up to 2^24 pairs in one call.
    block_rows = min(block_rows, max(2**24 // units.size(0), 1))
    counts = torch.zeros(bins, dtype=torch.float64)
    for start in range(0, units.size(0), block_rows):
        block = units[start : start + block_rows]  # [b, d]
        products = (block @ units[start:].t()).clamp_(-1, 1)  # [b, N - start]
        # Each pair once, and no row with itself: histc leaves out what is greater than 1.
        within = products[:, : len(block)]
        within.masked_fill_(torch.ones_like(within, dtype=torch.bool).tril_(), 2)
        counts += torch.histc(products.float(), bins, -1, 1).double().cpu()
    edges = torch.linspace(-1, 1, bins + 1, dtype=torch.float64)
    return edges.tolist(), [int(count) for count in counts.tolist()]


def positive_share(edges: Sequence[float], counts: Sequence[int]) -> float:
    """Return the share of the pairs whose cosine is not negative.

    Gao et al., section 3: "positive for almost all cases" in a degenerate table. It is one half in
    a random table.

    Args:
        edges: of the bins, increasing, with 0 among them.
        counts: one for each bin, not all zero.
    """
    return sum(count for edge, count in zip(edges, counts) if edge > -1e-9) / sum(counts)


@torch.no_grad()
def nearest_neighbours(
    matrix: Tensor, rows: Tensor, count: int, *, block_rows: int = 16384
) -> Tuple[Tensor, Tensor]:
    """Return the rows that have the greatest cosines with each of ``rows``, except itself.

    Args:
        matrix: W, shape (N, d).
        rows: indices, shape (q,).
        count: number of neighbours of each, at most N - 1.
        block_rows: number of rows that are compared at a time.

    Returns:
        Cosines and indices, each of shape (q, min(count, N - 1)), nearest first.
    """
    queries = unit_rows(matrix[rows])  # [q, d]
    count = min(count, matrix.size(0) - 1)
    cosines = queries.new_empty((len(rows), 0))
    neighbours = rows.new_empty((len(rows), 0))
    for start in range(0, matrix.size(0), block_rows):
        block = unit_rows(matrix[start : start + block_rows])  # [b, d]
        index = torch.arange(start, start + len(block), device=rows.device)
        products = queries @ block.t()  # [q, b]
        products.masked_fill_(rows.unsqueeze(1) == index, float("-inf"))
        cosines = torch.cat([cosines, products], 1)
        neighbours = torch.cat([neighbours, index.expand(len(rows), -1)], 1)
        cosines, at = cosines.topk(min(count, cosines.size(1)), dim=1)
        neighbours = neighbours.gather(1, at)
    return cosines, neighbours


# Isotropy of a table by its partition function: Z(a), I1 and I2.
#
# Wang, Huang, Huang, Hu, Wang, Gu, ICLR 2020, section 5.1,
# https://openreview.net/forum?id=ByxY8CNtvr, after Arora, Li, Liang, Ma, Risteski, TACL 2016,
# https://aclanthology.org/Q16-1028/, and Mu, Viswanath, ICLR 2018,
# https://openreview.net/forum?id=HkuGJ3kCb:
#
#     Z(a) = sum_i exp(<w_i, a>),   a in E, the eigenvectors of W'W
#     I1 = min_E Z / max_E Z,       I2 = sqrt(sum_E (Z - mean Z)^2 / |E|) / mean Z
#
# I1 = 1 and I2 = 0 for a perfectly isotropic table.
#
# Note [Sign and scale of I1 and I2]
# ----------------------------------
# The sign of an eigenvector is arbitrary, Z(a) and Z(-a) differ, and Z grows with the length of the
# rows: without a convention I1 and I2 are not defined. This package uses:
#
# * Sign: E holds both a and -a, 2d directions, so that nothing depends on the eigensolver.
# * Scale: W as it is, as in the paper. A table at half the scale has a larger I1, so only tables of
#   similar row length can be compared; the other natural choice is to divide W by the root mean
#   square of the lengths of its rows.
#
# A repeated eigenvalue leaves its eigenvectors undetermined within their plane; the definition has
# that gap.
#
# The caller leaves out rows that stand for no word (padding, ``madeupword``). These are measures,
# not penalties: they are computed in float64 over blocks of rows, so that no second copy of a large
# table is made, and they have no gradient.
#
# Note [Z in float32]
# -------------------
# :func:`log_partition` can form its products and exponentials in float32, four times as fast, and
# sum the blocks in float64. The rounding of an exponent is at most ||w_i|| eps, has either sign and
# averages out over the rows: with rows no longer than :data:`NARROW_ROW_NORM`, I1 and I2 keep five
# digits in the worst case and usually seven. This is meant for samples, whose own scatter is far
# larger. The eigenvectors stay float64, because small errors can turn them within a plane of close
# eigenvalues.

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


# IsoScore: how uniformly a cloud of points uses the dimensions of its space.
#
# Rudman, Gillman, Rayne, Eickhoff: "IsoScore: Measuring the Uniformity of Embedding Space
# Utilization", Findings of ACL 2022, https://aclanthology.org/2022.findings-acl.262/, section 4.
# With lambda the n eigenvalues of the covariance:
#
#     lambda^ = sqrt(n) lambda / ||lambda||              normalised
#     delta   = ||lambda^ - 1|| / sqrt(2 (n - sqrt n))   isotropy defect, 0 to 1
#     phi     = (n - delta^2 (n - sqrt n))^2 / n^2       share of dimensions in use, 1/n to 1
#     score   = (n phi - 1) / (n - 1)
#
# The score is 1 for a covariance that is a multiple of the identity and 0 where one direction has
# all the variance. It depends neither on rotation nor on scale. Because the mean is subtracted, a
# narrow cone far from the origin can still score high; the mean cosine shows that case.


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


# Condensation: from layer to layer the states of one sequence point more and more the same way.
#
# Liu et al.: "Dispersion loss counteracts embedding condensation and improves generalization in
# small language models", ICML 2026, https://arxiv.org/abs/2602.00217.


class SequenceCosine:
    """The mean cosine of different states of a sequence, averaged over sequences.

    It is what the paper measures in each layer, without the cosines of states with themselves. The
    sequences come one after the other, in blocks that are cut anywhere.
    """

    def __init__(self) -> None:
        self._sequence = -1
        self._sum: Optional[Tensor] = None
        self._count = self._with_direction = self._sequences = 0
        self._total = 0.0

    def add(self, states: Tensor, sequences: Tensor) -> None:
        """Add states.

        Args:
            states: shape (b, d); the cosines of a zero state are 0.
            sequences: the number of the sequence of each, >= 0 and rising, shape (b,).
        """
        units = unit_rows(states.detach().double()).cpu()
        numbers, sizes = sequences.cpu().unique_consecutive(return_counts=True)
        for number, part in zip(numbers.tolist(), units.split(sizes.tolist())):
            if number != self._sequence:
                self._close()
                self._sequence, self._sum = number, torch.zeros_like(part[0])
            self._sum += part.sum(0)
            self._count += len(part)
            self._with_direction += int(part.any(1).sum())

    def _close(self) -> None:
        if self._sum is not None and self._count > 1:
            pairs = self._count * (self._count - 1)
            self._total += (float(self._sum.square().sum()) - self._with_direction) / pairs
            self._sequences += 1
        self._sequence, self._sum, self._count, self._with_direction = -1, None, 0, 0

    def value(self) -> Optional[float]:
        """The mean over the sequences of two states or more; ``None`` if there are none."""
        self._close()
        return self._total / self._sequences if self._sequences else None
