"""Tables of figures as text."""

from __future__ import annotations

from typing import Sequence

from tabulate import tabulate


def text_table(
    rows: Sequence[Sequence[str]], headings: Sequence[str], style: str = "simple"
) -> str:
    """A table whose first column is aligned left and whose other columns are aligned right.

    Args:
        rows: cells, shown as they are.
        headings: one for each column.
        style: of the ``tabulate`` package: ``simple`` for terminals, ``pipe`` for Markdown.
    """
    alignment = ["left"] + ["right"] * (len(headings) - 1)
    return tabulate(rows, headings, tablefmt=style, colalign=alignment, disable_numparse=True)
