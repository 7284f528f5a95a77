"""The results as text: what was measured, the verdict, and the measures of each checkpoint."""

from __future__ import annotations

from typing import Any, Dict, List

from spectral_fairseq.analysis.catalogue import ALL, Measure, groups_in_use, shown
from spectral_fairseq.analysis.selection import MOST_VERDICTS, spread
from spectral_fairseq.analysis.wording import verdict, warnings
from spectral_fairseq.errors import printable, wrapped

# What a terminal shows of a table, beside the values of a random one.
FOUR = ("mean_cosine", "mean_share", "sigma_over_edge_centred", "effective_rank_centred")


def as_summary(document: Dict[str, Any]) -> str:
    """What was measured, the verdict, and four figures: at most 25 lines for one model."""
    parts = _parts(document["checkpoints"], {"": [m for m in ALL if m.key in FOUR]})
    parts[-1] += "\nAll measures: --all. The full report: --out DIR. For programs: --format json."
    return printable("\n\n".join(parts))


def as_text(document: Dict[str, Any]) -> str:
    """All measures of the document as aligned plain text."""
    checkpoints = document["checkpoints"]
    groups = groups_in_use([checkpoint["measures"] for checkpoint in checkpoints])
    signed = (f"{checkpoint['label']}: {checkpoint['signature']}" for checkpoint in checkpoints)
    return printable("\n\n".join([*_parts(checkpoints, groups), "\n".join(signed)]))


def _parts(checkpoints: List[Dict[str, Any]], groups: Dict[str, List[Measure]]) -> List[str]:
    """What was measured, the verdict, the table of measures and neighbours."""
    return [*_openings(checkpoints), _measures(checkpoints, groups), *_neighbours(checkpoints)]


def _neighbours(checkpoints: List[Dict[str, Any]]) -> List[str]:
    return [
        f"Neighbours of {word} in {checkpoint['label']}: "
        + ", ".join(f"{n['word']} {shown(n['cosine'], 3)}" for n in neighbours)
        for checkpoint in checkpoints
        for word, neighbours in checkpoint["neighbours"].items()
    ]


def _measures(checkpoints: List[Dict[str, Any]], groups: Dict[str, List[Measure]]) -> str:
    """Measures in groups, one column a checkpoint, and one for what random tables have."""
    headers = ["", *(checkpoint["label"] for checkpoint in checkpoints), "random table"]
    rows: List[Any] = []
    for group, measures in groups.items():
        rows += [None] if rows else []
        rows += [[group, *("" for _ in headers[1:])]] if group else []
        rows += [[m.title, *_values(checkpoints, m), _random(checkpoints, m)] for m in measures]
    return _aligned(rows, headers)


def _random(checkpoints: List[Dict[str, Any]], measure: Measure) -> str:
    """What random tables like these have: one value, or those of tables that differ in shape."""
    key = measure.key
    values = [measure.shown(one["random"][key]) for one in checkpoints if key in one["random"]]
    return " / ".join(dict.fromkeys(values))


def _aligned(rows: List[Any], headers: List[str]) -> str:
    """Columns of text, with a line where a row is None."""
    from tabulate import SEPARATING_LINE, tabulate  # only text needs it, a callback does not

    rows = [SEPARATING_LINE if row is None else row for row in rows]
    align = ("left", *("right" for _ in headers[1:]))
    return tabulate(rows, headers, disable_numparse=True, colalign=align)


def _openings(checkpoints: List[Dict[str, Any]]) -> List[str]:
    """The warnings, and what each model is; the same advice for several is printed once."""
    parts = [wrapped(f"Warning: {text}") for text in warnings(checkpoints)]
    advised: Dict[str, str] = {}  # advice -> label of the first model that it is for
    for checkpoint in spread(checkpoints, MOST_VERDICTS):
        *findings, advice = verdict(checkpoint)
        first = advised.setdefault(advice, checkpoint["label"])
        if first != checkpoint["label"]:
            advice = f"What to try is the same as for {first}."
        parts.append(_opening(checkpoint, " ".join([*findings, advice])))
    return parts


def _opening(checkpoint: Dict[str, Any], words: str) -> str:
    """The name, architecture, progress and table of one checkpoint, and ``words`` on it."""
    updates = checkpoint["progress"]["updates"]
    nameless = "word vectors without a model"
    if checkpoint["origin"] != "vectors":
        nameless = "a model of unknown architecture"
    name = f"{checkpoint['label']}: {checkpoint['arch'] or nameless}"
    return "\n".join(
        [
            name if updates is None else f"{name}, {updates:,} updates",
            wrapped(checkpoint["table"]["choice"], "  "),
            wrapped(words, "  "),
        ]
    )


def _values(checkpoints: List[Dict[str, Any]], measure: Measure) -> List[str]:
    return [measure.shown(checkpoint["measures"].get(measure.key)) for checkpoint in checkpoints]
