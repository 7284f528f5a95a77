"""Rows of a table: which ones, and block by block, so that no second copy of a large one is made.

Matrix products are fastest on blocks of :data:`BLOCK_ROWS`. Passes that do little with each number
are limited by the memory and take smaller blocks, :func:`cached_rows`.
"""

from __future__ import annotations

from typing import Any, Iterator, Optional, Type

import torch
from torch import Tensor

from spectral_fairseq.errors import DIVERGED, DataError, SpectralFairseqError
from spectral_fairseq.functional.precision import at_least_float32, full_float32

BLOCK_ROWS = 2048
# As float64, half of the second-level cache of a usual core.
_CACHED_NUMBERS = 1 << 16


def cached_rows(dim: int) -> int:
    """Return how many rows of ``dim`` numbers stay in the cache between operations on them."""
    return max(_CACHED_NUMBERS // dim, 1)


def checked_table(matrix: Tensor) -> Tensor:
    """Return ``matrix`` without its gradient.

    Raises:
        DataError: it does not have the shape (N, d) with N, d >= 1.
    """
    if matrix.dim() != 2 or 0 in matrix.shape:
        raise DataError(
            "a table of shape (N, d) with N, d >= 1",
            f"shape {tuple(matrix.shape)}",
            "Pass the embedding matrix, with one row for each word.",
        )
    return matrix.detach()


def rows_outside(count: int, excluded: Optional[Tensor], device: Any = "cpu") -> Tensor:
    """Return which of ``count`` rows are none of the excluded ones, shape (count,), bool."""
    kept = torch.ones(count, dtype=torch.bool, device=device)
    if excluded is not None:
        kept[excluded] = False
    return kept


def check_finite(weight: Tensor, name: str, error: Type[SpectralFairseqError] = DataError) -> None:
    """Refuse a table, shape (N, d), with numbers that nothing can be computed from.

    Args:
        weight: the table.
        name: stands for it in the message.
        error: the class that is raised.

    Raises:
        DataError: infinity or NaN; or an error of the class that is given.
    """
    broken = 0
    wide = at_least_float32(weight.dtype)
    for block in weight.split(BLOCK_ROWS):
        # A sum beyond float32 only means a closer look.
        if not torch.isfinite(block.sum(dtype=wide)):
            broken += int((~torch.isfinite(block).all(1)).sum())
    if broken:
        found = f"infinity or NaN in {broken} of {len(weight)} rows"
        raise error(f"finite numbers in {name}", found, DIVERGED)


def row_blocks(
    matrix: Tensor, block_rows: int = BLOCK_ROWS, dtype: torch.dtype = torch.float64
) -> Iterator[Tensor]:
    """Yield blocks of rows converted to ``dtype``; each block overwrites the one before.

    The conversion reuses one buffer, because fresh memory for each block would cost as much time
    as the conversion itself.

    Args:
        matrix: W, shape (N, d), as :func:`checked_table` returns it.
        block_rows: rows in a block; the last one may have fewer.
        dtype: of the blocks.
    """
    if matrix.dtype == dtype:
        yield from matrix.split(block_rows)
        return
    buffer = matrix.new_empty((min(block_rows, matrix.size(0)), matrix.size(1)), dtype=dtype)
    for block in matrix.split(block_rows):  # [b, d]
        yield buffer[: block.size(0)].copy_(block)


@torch.no_grad()
def multiply_(rows: Tensor, matrix: Tensor) -> None:
    """Multiply a matrix from the right in place, block by block.

    Args:
        rows: shape (n, d), of any floating dtype.
        matrix: shape (d, d).
    """
    dtype = at_least_float32(rows.dtype)
    factor = matrix.to(dtype)
    with full_float32(rows.device):
        for block in rows.split(BLOCK_ROWS):
            block.copy_(block.to(dtype) @ factor)


def sample_rows(count: int, wanted: int, seed: int) -> Tensor:
    """``wanted`` of ``count`` rows, uniformly, without repetition, in ascending order.

    All of them where ``wanted`` is not smaller.
    """
    if wanted >= count:
        return torch.arange(count)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=generator)[:wanted].sort().values


def same_values(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers; NaN is the same as NaN.

    Floating-point numbers may have different types, as those of a table that was stored twice.
    """
    same_type = tensor.dtype == other.dtype
    floating = tensor.is_floating_point() and other.is_floating_point()
    if tensor.shape != other.shape or not (same_type or floating):
        return False
    same_place = tensor.data_ptr() == other.data_ptr() and tensor.stride() == other.stride()
    if not tensor.numel() or (same_type and (same_place or torch.equal(tensor, other))):
        return True
    return all(
        bool(((x == y) | ((x != x) & (y != y))).all())
        for x, y in zip(*(torch.atleast_1d(v).split(BLOCK_ROWS) for v in (tensor, other)))
    )
