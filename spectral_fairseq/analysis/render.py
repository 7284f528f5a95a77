"""Tables of measures as text and as LaTeX, one column a checkpoint."""

from __future__ import annotations

import re
import textwrap
from typing import Any, Dict, List

from tabulate import SEPARATING_LINE, tabulate

from spectral_fairseq.analysis.catalogue import Measure, groups_in_use, shown
from spectral_fairseq.analysis.selection import spread
from spectral_fairseq.analysis.verdict import MOST_VERDICTS, verdict, warnings
from spectral_fairseq.errors import printable

# U+2581, with which SentencePiece begins words, is in no LaTeX font by default.
_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\u2581": r"\textvisiblespace{}",
}


def as_text(document: Dict[str, Any]) -> str:
    """The document as aligned plain text."""
    checkpoints = document["checkpoints"]
    parts = [_wrapped(f"Warning: {text}", "") for text in warnings(checkpoints)]
    parts += [_opening(one) for one in spread(checkpoints, MOST_VERDICTS)]
    rows: List[Any] = []
    for group, measures in _groups(document).items():
        rows += [SEPARATING_LINE] if rows else []
        rows.append([group, *("" for _ in checkpoints)])
        rows += [[m.title, *_values(checkpoints, m)] for m in measures]
    headers = ["", *(one["label"] for one in checkpoints)]
    align = ("left", *("right" for _ in checkpoints))
    parts.append(tabulate(rows, headers, disable_numparse=True, colalign=align))
    for one in checkpoints:
        for word, neighbours in one["neighbours"].items():
            near = ", ".join(f"{n['word']} {shown(n['cosine'], 3)}" for n in neighbours)
            parts.append(f"Neighbours of {word} in {one['label']}: {near}")
    parts.append("\n".join(f"{one['label']}: {one['signature']}" for one in checkpoints))
    return printable("\n\n".join(parts))


def _opening(checkpoint: Dict[str, Any]) -> str:
    """The name, architecture, progress and table of one checkpoint, and the verdict on it."""
    updates = checkpoint["progress"]["updates"]
    name = f"{checkpoint['label']}: {checkpoint['arch'] or 'unknown architecture'}"
    return "\n".join(
        [
            name if updates is None else f"{name}, {updates:,} updates",
            _wrapped(checkpoint["table"]["choice"], "  "),
            _wrapped(" ".join(verdict(checkpoint)), "  "),
        ]
    )


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(
        text,
        98,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def as_latex(document: Dict[str, Any]) -> str:
    """The document as a LaTeX table (package booktabs), signatures in comments above it."""
    checkpoints = document["checkpoints"]
    # A line break would end the comment, and what follows would be run by LaTeX.
    lines = [printable(f"% {one['label']}: {one['signature']}", keep="") for one in checkpoints]
    lines += [r"\begin{tabular}{l" + "r" * len(checkpoints) + "}", r"\toprule"]
    lines.append(" & ".join(["", *(escaped(one["label"]) for one in checkpoints)]) + r" \\")
    for group, measures in _groups(document).items():
        lines.append(r"\midrule")
        lines.append(rf"\multicolumn{{{len(checkpoints) + 1}}}{{l}}{{\emph{{{group}}}}} \\")
        lines += [
            " & ".join([m.latex, *map(_latex_number, _values(checkpoints, m))]) + r" \\"
            for m in measures
        ]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def escaped(text: str) -> str:
    """``text`` with LaTeX's special characters escaped, on one line."""
    return "".join(_LATEX.get(character, character) for character in printable(text, keep=""))


def _latex_number(number: str) -> str:
    if number == "–":
        return "--"
    return "$" + re.sub(r"e([+-])0*(\d+)", r"\\cdot10^{\g<1>\g<2>}", number).replace("+", "") + "$"


def _groups(document: Dict[str, Any]) -> Dict[str, List[Measure]]:
    return groups_in_use([one["measures"] for one in document["checkpoints"]])


def _values(checkpoints: List[Dict[str, Any]], measure: Measure) -> List[str]:
    return [shown(one["measures"].get(measure.key), measure.digits) for one in checkpoints]
