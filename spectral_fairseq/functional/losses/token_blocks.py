"""Cutting the tokens of a batch into blocks that have few different sizes.

Note [Few shapes]
-----------------
oneDNN prepares every new shape of a product and caches what it prepared, for a thousand shapes and
more. Batches differ in their number of tokens, and so would the last block of each batch: training
would meet new shapes for hundreds of updates, and the cached data would lie scattered over the
heap, between blocks of 16 MiB that then fit no gap. ``benchmarks/bench_block_memory.py`` shows it:
without a limit on the number of shapes a process grows by gigabytes. The last block is therefore
filled up with rows of zeros until its size is one of four in an octave: 1, 2, .. 7, 8, 10, 12, 14,
16, 20, .. These rows take part in the products, a tenth of the last block on average, and
contribute zero to the loss and to every gradient.
"""

from __future__ import annotations

from typing import Iterator, Optional, Tuple

import torch
from torch import Tensor

# Number of scores held at a time: 16 MiB of float32. Adding the share of a block to the gradient of
# the table costs a pass over N x d, which smaller blocks would repeat too often.
BLOCK_ELEMENTS = 4 * 1024 * 1024

SIZES_PER_OCTAVE = 4


def tokens_per_block(scores_per_token: int, block_elements: Optional[int] = None) -> int:
    """Return how many tokens fit into a block of ``block_elements`` scores, at least one."""
    return max(1, (block_elements or BLOCK_ELEMENTS) // scores_per_token)


def rows_for(tokens: int, block: int) -> int:
    """Return the number of rows of a block for ``tokens`` tokens, from ``tokens`` to ``block``."""
    step = max(1, (1 << max(0, tokens.bit_length() - 1)) // SIZES_PER_OCTAVE)
    return min(block, -(-tokens // step) * step)


def token_blocks(tokens: int, block: int) -> Iterator[Tuple[slice, int]]:
    """Yield the tokens of each block, at most ``block``, and the rows to fill it up to.

    :func:`filled` adds the missing rows.
    """
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        yield slice(start, stop), rows_for(stop - start, block)


def filled(values: Tensor, rows: int) -> Tensor:
    """Return ``values``, shape (t, *), followed by zeros up to ``rows``; unchanged if t = rows."""
    missing = rows - values.size(0)
    if missing == 0:
        return values
    return torch.cat([values, values.new_zeros((missing, *values.shape[1:]))])
