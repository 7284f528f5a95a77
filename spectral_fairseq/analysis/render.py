"""Tables of measures as text and as LaTeX, one column a checkpoint."""

from __future__ import annotations

import re
from typing import Any, Dict, List

from spectral_fairseq.analysis.catalogue import Measure, groups_in_use, shown
from spectral_fairseq.errors import printable

# U+2581, with which SentencePiece begins words, is in no LaTeX font by default.
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "\u2581": r"\textvisiblespace{}",
}  # fmt: skip


def as_text(document: Dict[str, Any]) -> str:
    """The document as aligned plain text."""
    checkpoints = document["checkpoints"]
    rows: List[List[str]] = [["", *(one["label"] for one in checkpoints)]]
    for group, measures in _groups(document).items():
        rows.append([group])
        rows += [[f"  {m.title}", *_values(checkpoints, m)] for m in measures]
    widths = [max(len(row[at]) for row in rows if len(row) > at) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        lines.append("  ".join(cells).rstrip())
    for one in checkpoints:
        for word, neighbours in one["neighbours"].items():
            near = ", ".join(f"{n['word']} {shown(n['cosine'], 3)}" for n in neighbours)
            lines.append(f"\nNeighbours of {word} in {one['label']}: {near}")
    lines.append("")
    lines += [f"{one['label']}: {one['signature']}" for one in checkpoints]
    return printable("\n".join(lines))


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
