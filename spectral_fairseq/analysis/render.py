"""Tables of measures as text, one column a checkpoint."""

from __future__ import annotations

import textwrap
from typing import Any, Dict, List, Mapping, Sequence

from spectral_fairseq.analysis.catalogue import ALL, Measure, groups_in_use, shown
from spectral_fairseq.analysis.options import spread
from spectral_fairseq.analysis.verdict import MOST_VERDICTS, verdict, warnings
from spectral_fairseq.errors import LINE_WIDTH, printable

# What a terminal shows of a table, beside the values of a random one.
FOUR = ("mean_cosine", "mean_share", "sigma_over_edge_centred", "effective_rank_centred")
# Of several tables also how far they are from the first one.
DRIFT = ("drift_cka", "drift_procrustes")


def as_summary(document: Dict[str, Any]) -> str:
    """What was measured, the verdict, and four figures: at most 25 lines for one model.

    Several models also have their distance from the first one, and seeds their mean.
    """
    checkpoints = document["checkpoints"]
    parts = _openings(checkpoints)
    compared = any(one["drift"] for one in checkpoints)
    asked = [m for m in ALL if m.key in (*FOUR, *(DRIFT if compared else ()))]
    parts.append(_measures(document, {"": asked}))
    if document["methods"]:
        parts.append(_over_seeds(document, asked))
    parts += _neighbours(checkpoints)
    parts[-1] += "\nAll measures: --all. The full report: --out DIR. For programs: --format json."
    return printable("\n\n".join(parts))


def as_text(document: Dict[str, Any]) -> str:
    """All measures of the document as aligned plain text."""
    checkpoints = document["checkpoints"]
    parts = _openings(checkpoints)
    parts.append(_measures(document, _groups(document)))
    if document["methods"]:
        parts.append(_over_seeds(document, ALL))
    parts += _neighbours(checkpoints)
    parts.append("\n".join(f"{one['label']}: {one['signature']}" for one in checkpoints))
    return printable("\n\n".join(parts))


def _neighbours(checkpoints: List[Dict[str, Any]]) -> List[str]:
    return [
        f"Neighbours of {word} in {one['label']}: "
        + ", ".join(f"{n['word']} {shown(n['cosine'], 3)}" for n in neighbours)
        for one in checkpoints
        for word, neighbours in one["neighbours"].items()
    ]


def _measures(document: Dict[str, Any], groups: Dict[str, List[Measure]]) -> str:
    """Measures in groups, one column a checkpoint; beside a single one what a random table has."""
    checkpoints = document["checkpoints"]
    random = checkpoints[0]["random"] if len(checkpoints) == 1 else None
    headers = ["", *(one["label"] for one in checkpoints)]
    headers += [] if random is None else ["random table"]
    rows: List[Any] = []
    for group, measures in groups.items():
        rows += [None] if rows else []
        rows += [[group, *("" for _ in headers[1:])]] if group else []
        for m in measures:
            cells = _values(checkpoints, m)
            if random is not None:
                cells.append(m.shown(random[m.key]) if m.key in random else "")
            rows.append([m.title, *cells])
    return _aligned(rows, headers)


def _over_seeds(document: Dict[str, Any], asked: Sequence[Measure]) -> str:
    """Of measures those that all seeds of some method have: mean and standard deviation."""
    methods = document["methods"]
    names = [f"{method['name']} (n = {len(method['labels'])})" for method in methods]
    rows = [
        [measure.title, *(spread_of(method, measure) for method in methods)]
        for measures in _groups(document).values()
        for measure in measures
        if measure in asked and any(measure.key in method["measures"] for method in methods)
    ]
    return _aligned(rows, ["mean ± standard deviation", *names])


def spread_of(method: Mapping[str, Any], measure: Measure) -> str:
    """Mean and standard deviation of a measure over the seeds of a method, for readers."""
    found = method["measures"].get(measure.key)
    if found is None:
        return shown(None)
    mean = measure.shown(found["mean"])
    return mean if found["std"] is None else f"{mean} ± {shown(found['std'], 2, measure.decimals)}"


def _aligned(rows: List[Any], headers: List[str]) -> str:
    """Columns of text, with a line where a row is None."""
    from tabulate import SEPARATING_LINE, tabulate  # only text needs it, a callback does not

    rows = [SEPARATING_LINE if row is None else row for row in rows]
    align = ("left", *("right" for _ in headers[1:]))
    return tabulate(rows, headers, disable_numparse=True, colalign=align)


def _openings(checkpoints: List[Dict[str, Any]]) -> List[str]:
    """The warnings, and what each model is; the same advice for several is printed once."""
    parts = [_wrapped(f"Warning: {text}", "") for text in warnings(checkpoints)]
    advised: Dict[str, str] = {}  # advice -> label of the first model that it is for
    for one in spread(checkpoints, MOST_VERDICTS):
        *findings, advice = verdict(one)
        first = advised.setdefault(advice, one["label"])
        if first != one["label"]:
            advice = f"What to try is the same as for {first}."
        parts.append(_opening(one, " ".join([*findings, advice])))
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
            _wrapped(checkpoint["table"]["choice"], "  "),
            _wrapped(words, "  "),
        ]
    )


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(
        text,
        LINE_WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _groups(document: Dict[str, Any]) -> Dict[str, List[Measure]]:
    return groups_in_use([one["measures"] for one in document["checkpoints"]])


def _values(checkpoints: List[Dict[str, Any]], measure: Measure) -> List[str]:
    return [measure.shown(one["measures"].get(measure.key)) for one in checkpoints]
