"""Rows of a table that look as if training had never reached them.

Land, Bartolo: "Fishing for Magikarp: Automatically Detecting Under-trained Tokens in Large
Language Models", EMNLP 2024, https://arxiv.org/abs/2405.05417, ranks tokens by the norm of their
input vectors, because weight decay shrinks a row that no gradient reaches. A report needs a rule
that decides. This one calls a row never trained if

1. it is zero; or
2. it equals another row bit for bit, which two gradients never bring about; or
3. its norm is unusually small: log ||w_i|| lies 5 robust standard deviations
   (``robust_scores.py``) below the median.

The third rule is blind where half of the rows or more are untrained, and where the initialisation
is as long as trained rows. A row that a tied softmax only pushed away counts as trained.
"""

from __future__ import annotations

from typing import List, Optional

import torch
from torch import Tensor

from spectral_fairseq.functional.robust_scores import OUTLYING, length_scores, zero_rows
from spectral_fairseq.functional.row_blocks import (
    cached_rows,
    checked_table,
)

# Two for a number of 8 bytes: its low bits are often zero, and would stay so in a product.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int32}
# Rows that differ nearly always differ in so many first columns.
_FIRST_COLUMNS = 16


@torch.no_grad()
def untrained_rows(matrix: Tensor, norms: Tensor) -> Tensor:
    """Return the rows that the three rules above name.

    Args:
        matrix: W, shape (N, d), of any floating dtype.
        norms: of its rows, shape (N,).

    Returns:
        Indices in ascending order, shape (m,).

    Raises:
        DataError: ``matrix`` is not a table.
    """
    zero, scores = zero_rows(norms), length_scores(norms)
    short = scores < -OUTLYING
    return (zero | short | repeated_rows(matrix)).nonzero().squeeze(1)


@torch.no_grad()
def repeated_rows(matrix: Tensor, *, block_rows: Optional[int] = None) -> Tensor:
    """Return whether another row has the same bits, shape (N,), bool.

    The bits of each row are hashed to 64 bits, in integers, which no order of summation changes.
    Different rows share a hash with a probability of about 1e-9 in a table of 100,000 words. Whole
    rows are read only where the first columns are repeated.

    Args:
        matrix: W, shape (N, d), of a floating dtype of 2, 4 or 8 bytes.
        block_rows: rows that are hashed at a time; as many as stay in the cache if not given.

    Raises:
        DataError: ``matrix`` is not a table.
    """
    matrix = checked_table(matrix)
    block_rows = block_rows or cached_rows(matrix.size(1))
    repeated = _occurs_again([_hashes(matrix[:, :_FIRST_COLUMNS])])
    rows = repeated.nonzero().squeeze(1)
    if rows.numel() > 0:
        repeated[rows] = _occurs_again([_hashes(matrix[part]) for part in rows.split(block_rows)])
    return repeated


def _hashes(rows: Tensor) -> Tensor:
    bits = rows.contiguous().view(_INTEGERS[rows.element_size()])
    generator = torch.Generator().manual_seed(0)
    halves = torch.randint(-(2**62), 2**62, (bits.size(1),), generator=generator, device="cpu")
    return (bits.long() * (halves * 2 + 1).to(rows.device)).sum(1)  # mod 2^64


def _occurs_again(hashes: List[Tensor]) -> Tensor:
    _, place, times = torch.unique(torch.cat(hashes), return_inverse=True, return_counts=True)
    return (times > 1)[place]
