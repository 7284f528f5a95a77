"""How the tokens of a batch are cut into blocks, whose sizes are few.

Note [Few shapes]
-----------------
oneDNN prepares every new shape of a product and keeps what it prepared, for a thousand shapes and
more. Batches differ in their number of tokens, and so would the last block of each: a training
would meet new shapes for hundreds of updates, and what is kept of them lies scattered over the
heap, between blocks of 16 MiB that then fit no gap. ``benchmarks/bench_block_memory.py`` shows it:
without a limit to the shapes a process grows by gigabytes. The last block is therefore filled up
with rows of zeros until its size is one of four in an octave: 1, 2, .. 7, 8, 10, 12, 14, 16, 20, ..
Those rows go through the products, a tenth of the last block on average, and count for nothing.
"""

from __future__ import annotations

from typing import Iterator, Optional, Tuple

import torch
from torch import Tensor

# Scores held at a time, in elements: 16 MiB of float32. Adding a block's share to the table's
# gradient costs a pass over N x d, which small blocks repeat too often.
BLOCK_ELEMENTS = 4 * 1024 * 1024

SIZES_PER_OCTAVE = 4


def tokens_per_block(scores_per_token: int, block_elements: Optional[int] = None) -> int:
    """How many tokens fit a block of ``block_elements`` scores; one at least."""
    return max(1, (block_elements or BLOCK_ELEMENTS) // scores_per_token)


def rows_for(tokens: int, block: int) -> int:
    """The rows of a block that has ``tokens`` tokens: no fewer, and no more than ``block``."""
    step = max(1, (1 << max(0, tokens.bit_length() - 1)) // SIZES_PER_OCTAVE)
    return min(block, -(-tokens // step) * step)


def token_blocks(tokens: int, block: int) -> Iterator[Tuple[slice, int]]:
    """Each block's tokens, ``block`` at most, and the rows to fill it up to with :func:`filled`."""
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        yield slice(start, stop), rows_for(stop - start, block)


def filled(values: Tensor, rows: int) -> Tensor:
    """``values``, shape (t, *), with zeros behind them up to ``rows``; itself where t = rows."""
    missing = rows - values.size(0)
    if missing == 0:
        return values
    return torch.cat([values, values.new_zeros((missing, *values.shape[1:]))])
