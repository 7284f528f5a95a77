"""The mean cosine between the two vectors that a word has in two tables, such as input and output.

    1/N sum_i <a_i - mean(a), b_i - mean(b)> / (||a_i - mean(a)|| ||b_i - mean(b)||)

It is 0 for tables that have nothing to do with each other, 1 for tied ones, and depends on the
coordinates, unlike the measures of ``table_drift.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.linalg.row_blocks import BLOCK_ROWS, checked_table
from spectral_fairseq.functional.linalg.row_norms import unit_rows


@torch.no_grad()
def paired_cosine(left: Tensor, right: Tensor, *, block_rows: int = BLOCK_ROWS) -> float:
    """Return the mean over the rows; the cosine of a zero row is taken as 0.

    Args:
        left: a, shape (N, d).
        right: b, shape (N, d).
        block_rows: rows that are converted at a time.

    Raises:
        DataError: different shapes.
    """
    left, right = checked_table(left), checked_table(right)
    if left.shape != right.shape:
        raise DataError(
            "two tables of one shape",
            f"{tuple(left.shape)}, {tuple(right.shape)}",
            "Choose others.",
        )
    means = [
        sum(block.double().sum(0) for block in table.split(block_rows)) / len(table)
        for table in (left, right)
    ]
    total = 0.0
    for one, other in zip(left.split(block_rows), right.split(block_rows)):
        units = [unit_rows(b.double() - m) for b, m in zip((one, other), means)]
        total += float((units[0] * units[1]).sum())
    return total / len(left)
