"""Reading a table block by block of rows, so that no second copy of a large one is made.

Matrix products are fastest on blocks of :data:`BLOCK_ROWS`. Passes that do little with each number
are limited by the memory and take smaller blocks, :func:`cached_rows`.
"""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor

from spectral_fairseq.errors import DataError

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
