"""Cutting the tokens of a batch into blocks that have few different sizes.

Note [Few shapes]
-----------------
oneDNN prepares every new shape of a product and caches what it prepared, for a thousand shapes and
more. Batches differ in their number of tokens, and so would the last block of each batch: training
would meet new shapes for hundreds of updates, and the cached data would lie scattered over the
heap, between blocks of 16 MiB that then fit no gap. ``benchmarks/bench_block_memory.py`` shows it:
without a limit on the number of shapes a process grows by gigabytes. The last block is therefore
filled up with copies of its last row until its size is one of four in an octave: 1, 2, .. 7, 8,
10, 12, 14, 16, 20, .. The copies take part in the products, a tenth of the last block on average,
and contribute zero to the loss and to every gradient. Rows of zeros would not do: their scores are
the bias alone, and a word whose bias is minus infinity would be the target of some.
"""

from __future__ import annotations

from typing import Iterator, Optional, Tuple

import torch
from torch import Tensor

# Number of scores held at a time: 16 MiB of float32. Adding the share of a block to the gradient of
# the table costs a pass over N x d, which smaller blocks would repeat too often.
BLOCK_ELEMENTS = 4 * 1024 * 1024
# On a GPU, whose time is that of starting kernels as long as blocks are small: 512 MiB of float32.
# With 4,096 tokens of a dictionary of 32,768 words a block is still a quarter of what the dense
# loss of 8,192 such tokens holds.
CUDA_BLOCK_ELEMENTS = 128 * 1024 * 1024
# The scores, their log-space form, a temporary of that and what the products read, at most.
BYTES_PER_SCORE = 16

SIZES_PER_OCTAVE = 4


def elements_for(device: torch.device) -> int:
    """Return how many scores are held at a time on ``device``.

    On a GPU it is a power of two, so that it seldom changes and the allocator can use its memory
    again, and takes at most half of the memory that is free.
    """
    if device.type != "cuda":
        return BLOCK_ELEMENTS
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    fitting = max(1, free // (2 * BYTES_PER_SCORE))
    return max(BLOCK_ELEMENTS, min(CUDA_BLOCK_ELEMENTS, 1 << (fitting.bit_length() - 1)))


def tokens_per_block(
    scores_per_token: int, device: torch.device, block_elements: Optional[int] = None
) -> int:
    """Return how many tokens fit into a block of ``block_elements`` scores, at least one.

    ``None`` takes :func:`elements_for` the device.
    """
    return max(1, (block_elements or elements_for(device)) // scores_per_token)


def rows_for(tokens: int, block: int) -> int:
    """Return the number of rows of a block for ``tokens`` tokens, from ``tokens`` to ``block``."""
    step = max(1, (1 << max(0, tokens.bit_length() - 1)) // SIZES_PER_OCTAVE)
    return min(block, -(-tokens // step) * step)


def token_blocks(tokens: int, block: int) -> Iterator[Tuple[slice, int]]:
    """Yield the tokens of each block, at most ``block``, and the rows to fill it up to.

    :func:`filled` adds the missing rows, and :func:`padded` the zeros that leave them out.
    """
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        yield slice(start, stop), rows_for(stop - start, block)


def filled(values: Tensor, rows: int) -> Tensor:
    """Return ``values``, shape (t, *), and their last row again up to ``rows``; t is 1 or more."""
    missing = rows - values.size(0)
    if missing == 0:
        return values
    return torch.cat([values, values[-1:].expand(missing, *values.shape[1:])])


def padded(values: Tensor, rows: int) -> Tensor:
    """Return ``values``, shape (t, *), followed by zeros up to ``rows``; unchanged if t = rows."""
    missing = rows - values.size(0)
    if missing == 0:
        return values
    return torch.cat([values, values.new_zeros((missing, *values.shape[1:]))])
