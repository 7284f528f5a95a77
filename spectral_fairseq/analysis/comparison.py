"""Two tables of one run, and several runs of one method: how far words moved, means over seeds."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.checkpoints.dictionary import WordList
from spectral_fairseq.checkpoints.tables import StoredTable
from spectral_fairseq.errors import check_count
from spectral_fairseq.functional.ranks import random_cka, random_procrustes
from spectral_fairseq.functional.rows import centred_products, linear_cka, procrustes_residual

# How far the table of one checkpoint has moved from that of another, over the words of both.


@dataclass
class Reference:
    """The table that others are compared with.

    Attributes:
        label: of its checkpoint.
        table: without rows that stand for no word.
        words: its dictionary, if there is one.
        sha256: as in the document.
    """

    label: str
    table: StoredTable
    words: Optional[WordList]
    sha256: str = ""


class Drift(NamedTuple):
    """How far a table is from another one.

    Attributes:
        measures: ``drift_*``; None where the tables have fewer than two words in common.
        random: the same of two independent random tables of these words, where that is known.
        words: how many words both tables have.
    """

    measures: Dict[str, Optional[float]]
    random: Dict[str, float]
    words: int


def drift(reference: Reference, other: Reference) -> Drift:
    """Compare two tables over the words that both have."""
    rows = common_rows(reference, other)
    if rows is None:
        return Drift({"drift_cka": None, "drift_procrustes": None}, {}, 0)
    products = centred_products(reference.table.weight, other.table.weight, *rows)
    found = {"drift_cka": linear_cka(products), "drift_procrustes": procrustes_residual(products)}
    measures = {key: value if value == value else None for key, value in found.items()}
    count, widths = len(rows[0]), [one.table.weight.size(1) for one in (reference, other)]
    random = {
        "drift_cka": random_cka(count, *widths),
        "drift_procrustes": random_procrustes(count, *widths),
    }
    return Drift(measures, {k: value for k, value in random.items() if value is not None}, count)


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


# Mean and spread of every measure over the seeds of a method.


def check_methods(methods: Sequence[str], count: int) -> None:
    """Refuse another number of names than there are checkpoints."""
    remedy = "Separate them by commas, and repeat the name of a method for each of its seeds."
    check_count(len(methods), count, "names in --methods, one for each checkpoint", remedy)


def by_method(
    checkpoints: Sequence[Mapping[str, Any]], methods: Sequence[str]
) -> List[Dict[str, Any]]:
    """Return the entries ``methods`` of the document, in the order in which methods first appear.

    Checkpoints of equal ``methods`` are the seeds of one.

    Returns:
        For each method its name, the labels of its checkpoints, and for each measure that all of
        them have the mean and the sample standard deviation (divided by n - 1), which is None for
        a single checkpoint.
    """
    check_methods(methods, len(checkpoints))
    found = []
    for name in dict.fromkeys(methods):
        seeds = [one for one, method in zip(checkpoints, methods) if method == name]
        known = {
            key: [one["measures"][key] for one in seeds]
            for key in seeds[0]["measures"]
            if all(one["measures"].get(key) is not None for one in seeds)
        }
        found.append(
            {
                "name": name,
                "labels": [one["label"] for one in seeds],
                "measures": {key: _summary(values) for key, values in known.items()},
            }
        )
    return found


def _summary(values: List[float]) -> Dict[str, Any]:
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": spread}
