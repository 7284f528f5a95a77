"""All measures of one table, with the curves and lists that a report draws."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.analysis.catalogue import measure_all, random_values
from spectral_fairseq.analysis.options import Options, StepCallback
from spectral_fairseq.analysis.table_facts import TableFacts
from spectral_fairseq.checkpoints.dictionary import WordList
from spectral_fairseq.errors import DataError, idle_flag
from spectral_fairseq.formats.table import StoredTable
from spectral_fairseq.functional.cosines import nearest_neighbours
from spectral_fairseq.functional.row_blocks import sample_rows
from spectral_fairseq.functional.spectrum_penalty import Prior

# Points of the pictures of counts, which draw each of them.
COUNT_POINTS = 1000
NAMED_ROWS = 50
# In edges of a random table's spectrum: what lies beyond is not due to chance.
BEYOND = 1.1


@dataclass
class Measured:
    """The results of measuring one table.

    Attributes:
        measures: key of :mod:`catalogue` -> value, None where it does not apply.
        details: curves and lists, ready for JSON.
        projection: coordinates of the sampled words, shape (m, 2), for the picture only.
        projection_rank: their places in the order of frequency, shape (m,).
    """

    measures: Dict[str, Optional[float]]
    details: Dict[str, Any]
    projection: Tensor
    projection_rank: Tensor


def measure_table(
    table: StoredTable,
    options: Options,
    words: Optional[WordList] = None,
    prior: Optional[Prior] = None,
    progress: Optional[StepCallback] = None,
) -> Measured:
    """Measure one table, with the arguments of :class:`TableFacts`."""
    queries = _query_rows(table, options, words)
    facts = TableFacts(table, options, words, prior, progress)
    # First what refuses tables: vectors that are too long for everything else, or all zero.
    _, sigma = facts.norms, facts.sigma
    measures = measure_all(facts)
    facts.progress.begin("norms and neighbours")
    sampled = len(facts.cosine_sample)
    isotropy = facts.isotropy
    prior_sigma = facts.prior_sigma
    details: Dict[str, Any] = {
        "singular_values": sigma.tolist(),
        "prior": None if prior_sigma is None else prior_sigma.tolist(),
        "isotropy_runs": isotropy.words and {"words": isotropy.words, "values": isotropy.samples},
        "random": random_values(facts),
        "random_singular_values": facts.random_sigma.tolist(),
        "centred": {
            "singular_values": facts.centred_sigma.tolist(),
            "cosines": {**facts.centred_cosines.coarse(), "words": sampled},
        },
        "cosines": {**facts.cosines.coarse(), "words": sampled},
        "counts": _counts(facts),
        "untrained": _named(facts, facts.untrained[:NAMED_ROWS]),
        "dominant_row": _dominant_row(facts),
        "frequency_order": "rows" if facts.log_counts is None else "counts",
        "neighbours": _neighbours(table, words, queries, options),
    }
    return Measured(measures, details, *_projection(facts))


def _counts(facts: TableFacts) -> Optional[Dict[str, List[float]]]:
    """Counts and norms of some words, evenly spaced in the logarithm of their rank, in order."""
    if facts.words is None or facts.log_counts is None:
        return None
    steps = torch.logspace(0, math.log10(facts.count), COUNT_POINTS, dtype=torch.float64)
    ranks = steps.round().long().clamp(1, facts.count).unique()
    rows = facts.frequency_order[ranks - 1]
    return {
        "rank": ranks.tolist(),
        "count": [facts.words.counts[row] for row in facts.table.rows[rows].tolist()],
        "log_count": facts.log_counts[rows].tolist(),
        "norm": facts.norms[rows].tolist(),
    }


def _named(facts: TableFacts, places: Tensor) -> List[Dict[str, Any]]:
    """Rows of the checkpoint, with their words where they are known."""
    symbols = None if facts.words is None else facts.words.symbols
    rows = facts.table.rows[places].tolist()
    return [{"row": row, "word": None if symbols is None else symbols[row]} for row in rows]


def _dominant_row(facts: TableFacts) -> Optional[Dict[str, Any]]:
    """The row that makes up half or more of the first direction of the centred table, if one does.

    For this to mean anything, that direction has to exceed what a random table has, and the row has
    to be twice as long as any other, each minus the mean row.
    """
    first = float(facts.centred_sigma[0])
    if first <= BEYOND * facts.centred_edge:
        return None
    (longest, second), (place, _) = facts.centred_norms.topk(2)
    if longest**2 < first**2 / 2 or 2 * second > longest:
        return None
    share = float((longest / facts.centred_sigma.norm()) ** 2)
    return {**_named(facts, place[None])[0], "share": share}


def _projection(facts: TableFacts) -> Tuple[Tensor, Tensor]:
    """Coordinates of the sampled words in two dimensions, and their frequency ranks."""
    options, order = facts.options, facts.frequency_order
    centred = options.projection == "pca"
    axes = (facts.principal_axes if centred else facts.directions)[:, :2]
    # Signs of eigenvectors are arbitrary; these do not depend on the machine.
    axes = axes * torch.where(facts.mean @ axes < 0, -1.0, 1.0)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(1, facts.count + 1)
    sampled = sample_rows(facts.count, options.projection_words, options.seed)
    points = facts.weight[sampled].double()
    points = (points - facts.mean if centred else points) @ axes
    if facts.dim == 1:
        points = torch.cat([points, torch.zeros_like(points)], 1)
    return points, rank[sampled]


def _query_rows(table: StoredTable, options: Options, words: Optional[WordList]) -> Dict[str, int]:
    """Words of ``options.words`` -> row of ``table.weight``."""
    if not options.words:
        return {}
    if words is None:
        raise idle_flag("`words`", "`dictionary`")
    place = {row: index for index, row in enumerate(table.rows.tolist())}
    rows: Dict[str, int] = {}
    for word in options.words:
        row = words.row_of(word)
        if row is None or row not in place:
            bare = word.strip("@\u2581") or word
            near = [symbol for symbol in words.symbols if bare in symbol][:5]
            raise DataError(
                f"the word {str(word)!r} in {words.path or 'the dictionary'}",
                f"only words such as {', '.join(near)}" if near else "nothing like it",
                "Words are spelled as in dict.txt: with subword marks such as @@ or \u2581.",
            )
        rows[word] = place[row]
    return rows


def _neighbours(
    table: StoredTable, words: Optional[WordList], queries: Dict[str, int], options: Options
) -> Dict[str, List[Dict[str, Any]]]:
    if not queries or words is None:
        return {}
    rows = torch.tensor(list(queries.values()))
    cosines, neighbours = nearest_neighbours(table.weight, rows, options.neighbours)
    return {
        word: [
            {"word": words.symbols[int(table.rows[at])], "cosine": float(cosine)}
            for cosine, at in zip(cosines[index], neighbours[index])
        ]
        for index, word in enumerate(queries)
    }
