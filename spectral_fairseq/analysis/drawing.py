"""A picture: its style, its files in PNG and SVG, and the package that draws it.

pyplot is not imported, so that the backend and the open figures of a notebook stay as they are.
"""

from __future__ import annotations

import base64
import io
import logging
from dataclasses import dataclass, field
from typing import Any, Callable, Dict

from spectral_fairseq.errors import needs_extra

Draw = Callable[[Any], Any]
"""Takes what makes figures by ``subplots``; returns the figure."""

INK, GROUND = "#1a1a1a", "#ffffff"
STYLE: Dict[str, Any] = {
    "figure.facecolor": GROUND,
    "axes.facecolor": GROUND,
    "savefig.facecolor": GROUND,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": "#d0d0d0",
    "axes.grid": True,
    "axes.axisbelow": True,
    "font.size": 11,
    "legend.frameon": True,
    "legend.facecolor": GROUND,
    "legend.edgecolor": GROUND,
    "svg.hashsalt": "spectral-fairseq",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
FILES = ("svg", "png")


def import_matplotlib() -> Any:
    """The package matplotlib."""
    with needs_extra("plots", "for pictures and the report", ", or leave out --out"):
        import jinja2  # noqa: F401  # which the page needs, after all the work
        import matplotlib.figure
    # fairseq opens the root logger for everything; matplotlib logs each font that it considers.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    logging.getLogger("fontTools").setLevel(logging.WARNING)
    return matplotlib


class _Figures:
    """Makes figures as pyplot does, without a window for them."""

    @staticmethod
    def subplots(*grid: int, figsize: Any, layout: Any = None, **settings: Any) -> Any:
        figure = import_matplotlib().figure.Figure(figsize=figsize, layout=layout)
        return figure, figure.subplots(*grid, **settings)


@dataclass
class Picture:
    """One picture.

    Attributes:
        name: of its files.
        title: for readers.
        alt: what it shows, with its main figures, for those who cannot see it.
        draw: makes the figure.
    """

    name: str
    title: str
    alt: str
    draw: Draw
    _files: Dict[str, bytes] = field(default_factory=dict, repr=False)

    def figure(self) -> Any:
        """The picture as a ``matplotlib.figure.Figure``."""
        with import_matplotlib().rc_context(STYLE):
            return self.draw(_Figures)

    def file(self, kind: str) -> bytes:
        """The picture as a file of a kind of :data:`FILES`, drawn when it is first needed."""
        if not self._files:
            figure = self.figure()
            with import_matplotlib().rc_context(STYLE):
                for extension in FILES:
                    buffer = io.BytesIO()
                    # No date, so that the same results give the same file.
                    date = {"Date": None} if extension == "svg" else None
                    figure.savefig(
                        buffer, format=extension, dpi=160, bbox_inches="tight", metadata=date
                    )
                    self._files[extension] = buffer.getvalue()
        return self._files[kind]

    @property
    def url(self) -> str:
        """The SVG as a data: URL."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.file('svg')).decode()}"
