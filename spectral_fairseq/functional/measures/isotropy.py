"""How evenly the rows of a table fill their space: Z(a), I1, I2, mean cosine, effective rank.

Wang et al., ICLR 2020, section 5.1, after Arora et al., TACL 2016, and Mu and Viswanath, ICLR 2018:

    Z(a) = sum_i exp(<w_i, a>),   a in E, the eigenvectors of W'W
    I1 = min_E Z / max_E Z,       I2 = sqrt(sum_E (Z - mean Z)^2 / |E|) / mean Z

I1 = 1 and I2 = 0 for a perfectly isotropic table.

Note [Sign and scale of I1 and I2]
----------------------------------
An eigenvector's sign is arbitrary, Z(a) and Z(-a) differ, and Z grows with the length of the rows:
without a convention I1 and I2 are not defined. Ours:

* Sign: E holds both a and -a, 2d directions. Nothing then depends on the eigensolver.
* Scale: W as it is, as in the paper. A table at half the scale has a larger I1, so only tables of
  similar row length can be compared; the other natural choice is ``scale = 1 / rms_row_norm(W)``.

:func:`log_partition` gives the two signs as two rows, the first along the rows' mean, so the other
sign convention, one direction for each eigenvector, is had from the first row alone. A repeated
eigenvalue leaves its eigenvectors free within their plane; that is inherent in the definition.

Rows that stand for no word (padding, ``madeupword``) are left out by the caller. These are
measures, not penalties: computed in float64 over blocks of rows, so that no second copy of a large
table is made, and without a gradient.

Note [Z in float32]
-------------------
:func:`log_partitions` can form its products and exponentials in float32, four times as fast, and
sum the blocks in float64. An exponent's rounding, at most ||w_i|| eps, has either sign and averages
out over the rows: with rows no longer than :data:`NARROW_ROW_NORM` I1 and I2 keep five digits in
the worst case, seven as a rule. That is for samples, whose own scatter is far larger; the
eigenvectors, which small errors can turn within a plane of close eigenvalues, stay float64.
"""

from __future__ import annotations

from typing import Callable, Iterator, Optional, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.linalg.accumulated_gram import accumulate_gram, mirror_gram
from spectral_fairseq.functional.linalg.products import matmul_transposed
from spectral_fairseq.functional.penalties.cosine import cosine_penalty

BLOCK_ROWS = 2048
# Rows up to this long may be measured by Note [Z in float32].
NARROW_ROW_NORM = 64.0
# exp of it, its inverse, and sums of either over a block are far from the type's limits.
_SAFE_EXPONENT = {torch.float64: 300.0, torch.float32: 70.0}

Progress = Callable[[int], None]


def _unheard(rows: int) -> None:
    """Nobody follows the progress."""


def _checked(matrix: Tensor) -> Tensor:
    if matrix.dim() != 2 or 0 in matrix.shape:
        raise DataError(
            "a table of shape (N, d) with N, d >= 1",
            f"shape {tuple(matrix.shape)}",
            "Pass the embedding matrix, one row a word.",
        )
    return matrix.detach()


def _blocks(
    matrix: Tensor, block_rows: int, dtype: torch.dtype = torch.float64
) -> Iterator[Tensor]:
    """Blocks of rows in ``dtype``, one after the other in the same memory.

    Fresh pages for each block would cost as much time as the conversion.
    """
    if matrix.dtype == dtype:
        yield from matrix.split(block_rows)
        return
    converted = matrix.new_empty((min(block_rows, matrix.size(0)), matrix.size(1)), dtype=dtype)
    for block in matrix.split(block_rows):  # [b, d]
        yield converted[: block.size(0)].copy_(block)


@torch.no_grad()
def right_singular_system(
    matrix: Tensor, *, block_rows: int = BLOCK_ROWS, progress: Progress = _unheard
) -> Tuple[Tensor, Tensor]:
    """Singular values of W and the eigenvectors of W'W, both from the d x d Gram matrix.

    Unlike :func:`spectral_fairseq.functional.linalg.singular_values.singular_values`, which serves
    penalties, it works in float64 whatever the table's type, and also gives the directions.

    Args:
        matrix: W, shape (N, d).
        block_rows: rows converted to float64 at a time.
        progress: called with the number of rows of each block when it is done.

    Returns:
        sigma, shape (d,), largest first, zero where it cannot be told from zero (N < d included);
        A, shape (d, d), whose column k belongs to sigma_k. Both float64.

    Raises:
        DataError: not a table, or entries that are infinite or not a number.
    """
    matrix = _checked(matrix)
    gram = matrix.new_zeros((matrix.size(1), matrix.size(1)), dtype=torch.float64)
    for block in _blocks(matrix, block_rows):
        accumulate_gram(gram, block)
        progress(block.size(0))
    mirror_gram(gram)
    if not torch.isfinite(gram).all():
        raise DataError(
            "a table of finite numbers",
            "infinity or NaN among its entries",
            "Training diverged, or the file is damaged: take an earlier checkpoint.",
        )
    values, vectors = torch.linalg.eigh(gram)
    # The entries of the Gram matrix carry the rounding of sums of N products.
    noise = torch.finfo(torch.float64).eps * max(matrix.shape) * float(values[-1])
    sigma = torch.where(values > noise, values, torch.zeros_like(values)).sqrt()
    return sigma.flip(0), vectors.flip(1)


@torch.no_grad()
def log_partition(
    matrix: Tensor, directions: Tensor, *, scale: float = 1.0, block_rows: int = BLOCK_ROWS
) -> Tensor:
    """log Z(a) and log Z(-a) for each direction; in logarithms, so large rows do not overflow.

    Args:
        matrix: W, shape (N, d).
        directions: unit vectors as columns, shape (d, m), such as A of
            :func:`right_singular_system`.
        scale: factor on W; see Note [Sign and scale of I1 and I2].
        block_rows: rows converted to float64 at a time.

    Returns:
        Shape (2, m), float64. Row 0 is for the sign of each direction that has
        sum_i <w_i, a> >= 0, row 1 for the opposite one.

    Raises:
        DataError: not a table.
    """
    return log_partitions(matrix, directions, (scale,), block_rows=block_rows)[0]


@torch.no_grad()
def log_partitions(
    matrix: Tensor,
    directions: Tensor,
    scales: Sequence[float],
    *,
    block_rows: int = BLOCK_ROWS,
    dtype: torch.dtype = torch.float64,
    progress: Progress = _unheard,
) -> Tensor:
    """:func:`log_partition` at several scales s of W, for one product with the directions.

    Args:
        matrix: as there.
        directions: as there.
        scales: factors on W.
        block_rows: as there.
        dtype: of products and exponentials, float64 or float32; see Note [Z in float32].
        progress: called with the number of rows of each block when it is done.

    Returns:
        Shape (s, 2, m), float64.

    Raises:
        DataError: not a table.
    """
    matrix = _checked(matrix)
    axes = directions.to(dtype).t().contiguous()  # [m, d]
    total = axes.new_zeros(axes.size(0), dtype=torch.float64)  # [m], sum_i <w_i, a>
    log_z = total.new_full((len(scales), 2, axes.size(0)), float("-inf"))
    powers = axes.new_empty((min(block_rows, matrix.size(0)), axes.size(0)))
    for block in _blocks(matrix, block_rows, dtype):
        products = matmul_transposed(block, axes)  # [b, m]
        total += products.sum(0)
        largest = max(float(bound.abs()) for bound in torch.aminmax(products))
        for found, scale in zip(log_z, scales):
            if largest * abs(scale) < _SAFE_EXPONENT[dtype]:
                # Both signs from one exponential.
                z = torch.mul(products, scale, out=powers[: len(block)]).exp_()  # [b, m]
                both = torch.stack([z.sum(0), z.reciprocal_().sum(0)]).double().log()
            else:
                scaled = scale * products.double()
                both = torch.stack([torch.logsumexp(scaled, 0), torch.logsumexp(-scaled, 0)])
            torch.logaddexp(found, both, out=found)
        progress(block.size(0))
    return torch.where(total >= 0, log_z, log_z.flip(1))


def isotropy_i1(log_z: Tensor) -> Tensor:
    """I1 = min Z / max Z over all entries of ``log_z`` (any shape): scalar in [0, 1]."""
    return (log_z.min() - log_z.max()).exp()


def isotropy_i2(log_z: Tensor) -> Tensor:
    """I2 = std Z / mean Z over all entries of ``log_z`` (any shape), dividing by |E|: scalar."""
    z = (log_z - log_z.max()).exp()  # the factor cancels
    return z.std(unbiased=False) / z.mean()


@torch.no_grad()
def rms_row_norm(matrix: Tensor) -> float:
    """sqrt(mean_i ||w_i||^2) of W, shape (N, d)."""
    matrix = _checked(matrix)
    total = sum(float(block.square().sum()) for block in _blocks(matrix, BLOCK_ROWS))
    return (total / matrix.size(0)) ** 0.5


@torch.no_grad()
def mean_cosine(matrix: Tensor, excluded: Optional[Tensor] = None) -> float:
    """Mean cosine over the N (N - 1) ordered pairs of different rows; a zero row's is taken as 0.

    The penalty of :mod:`spectral_fairseq.functional.penalties.cosine` divides the same sum by N^2.

    Args:
        matrix: W, shape (n, d).
        excluded: distinct indices of the rows left out (padding and the like), shape (m,);
            N = n - m >= 2.

    Raises:
        DataError: fewer than two rows.
    """
    matrix = _checked(matrix)
    count = matrix.size(0) - (0 if excluded is None else excluded.numel())
    if count < 2:
        raise DataError(
            "at least two rows for a mean cosine",
            f"{count}",
            "Pass the whole embedding matrix.",
        )
    exact = matrix if matrix.dtype == torch.float64 else matrix.float()
    return float(cosine_penalty(exact, excluded)) * count / (count - 1)


def effective_rank(sigma: Tensor) -> float:
    """exp of the entropy of sigma_k / sum sigma (Roy and Vetterli, EUSIPCO 2007).

    Args:
        sigma: singular values, shape (d,), >= 0.

    Returns:
        Between 1, one direction only, and d, all alike; 0 for a zero table.
    """
    total = sigma.double().sum()
    if total <= 0:
        return 0.0
    share = sigma.double() / total
    return float(torch.special.entr(share).sum().exp())
