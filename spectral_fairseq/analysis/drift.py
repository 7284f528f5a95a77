"""How far the table of one checkpoint has moved from that of another, over the words of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.checkpoints.dictionary import WordList
from spectral_fairseq.checkpoints.tables import StoredTable
from spectral_fairseq.functional.measures.table_drift import (
    centred_products,
    linear_cka,
    procrustes_residual,
)


@dataclass
class Reference:
    """The table that others are compared with.

    Attributes:
        label: of its checkpoint.
        table: without rows that stand for no word.
        words: its dictionary, if there is one.
    """

    label: str
    table: StoredTable
    words: Optional[WordList]


def drift(reference: Reference, other: Reference) -> Tuple[Dict[str, Optional[float]], int]:
    """Return the measures ``drift_*``, and the number of words that both tables have.

    Args:
        reference: the first checkpoint's.
        other: the one that is measured.

    Returns:
        The measures are None where the tables have fewer than two words in common.
    """
    rows = common_rows(reference, other)
    if rows is None:
        return {"drift_cka": None, "drift_procrustes": None}, 0
    products = centred_products(reference.table.weight, other.table.weight, *rows)
    found = {"drift_cka": linear_cka(products), "drift_procrustes": procrustes_residual(products)}
    return {key: value if value == value else None for key, value in found.items()}, len(rows[0])


def common_rows(one: Reference, other: Reference) -> Optional[Tuple[Tensor, Tensor]]:
    """Return the rows of either ``table.weight`` that stand for the same words, shape (N,) each.

    Words are the same by their spelling, or without two dictionaries by their row, if both tables
    are stored with as many rows. None where fewer than two are in common.
    """
    if one.words is not None and other.words is not None:
        names = [
            [words.symbols[row] for row in table.rows.tolist()]
            for table, words in ((one.table, one.words), (other.table, other.words))
        ]
    elif one.table.stored_rows == other.table.stored_rows:
        names = [[str(row) for row in part.table.rows.tolist()] for part in (one, other)]
    else:
        return None
    place = {name: at for at, name in enumerate(names[0])}
    pairs = [(place[name], at) for at, name in enumerate(names[1]) if name in place]
    if len(pairs) < 2:
        return None
    left, right = torch.tensor(pairs).t()
    return left, right
