"""One picture as a figure of matplotlib, and as files for light and dark pages.

pyplot is not imported, so that the backend and the open figures of a notebook stay as they are.
"""

from __future__ import annotations

import io
import logging
from typing import Any, Callable, Dict, Iterator, Mapping

from spectral_fairseq.errors import ConfigurationError

Draw = Callable[[Any, Dict[str, Any]], Any]
"""Takes what makes figures by ``subplots``, and a palette; returns the figure."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DARK_COLOURS = ("#56B4E9", "#E69F00", "#1FC79B", "#E79BC4", "#6FA8FF", "#F0E442", "#FFFFFF")
# ``words`` are the ends of cividis between which words are coloured, frequent ones first.
THEMES: Dict[str, Dict[str, Any]] = {
    "light": {
        "ink": "#1a1a1a",
        "ground": "#ffffff",
        "grid": "#d0d0d0",
        "origin": "#C0392B",
        "words": (0.85, 0.0),
    },
    "dark": {
        "ink": "#e8e8e8",
        "ground": "#16191d",
        "grid": "#3a4048",
        "origin": "#FF6B57",
        "words": (1.0, 0.35),
    },
}
FILES = ("light.svg", "light.png", "dark.svg")


def import_matplotlib() -> Any:
    """The package matplotlib.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ConfigurationError(
            "matplotlib, for pictures and the report",
            "no such package",
            "Run pip install matplotlib, or leave out --out.",
        ) from error
    # fairseq opens the root logger for everything; matplotlib logs each font that it considers.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    logging.getLogger("fontTools").setLevel(logging.WARNING)
    return matplotlib


class Drawing(Mapping[str, bytes]):
    """The files of a picture by their names, :data:`FILES`, drawn when one is first needed.

    Args:
        draw: makes the figure.
    """

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._files: Dict[str, bytes] = {}

    def figure(self, theme: str = "light") -> Any:
        """The picture as a ``matplotlib.figure.Figure``.

        Args:
            theme: of :data:`THEMES`.
        """
        colours = THEMES[theme]
        palette = {**colours, "curves": COLOURS if theme == "light" else DARK_COLOURS}
        with import_matplotlib().rc_context(_style(colours)):
            return self._draw(_Figures, palette)

    def __getitem__(self, name: str) -> bytes:
        if not self._files:
            for theme in dict.fromkeys(file.split(".")[0] for file in FILES):
                self._files.update(self._rendered(theme))
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(FILES)

    def __len__(self) -> int:
        return len(FILES)

    def _rendered(self, theme: str) -> Dict[str, bytes]:
        found = {}
        figure = self.figure(theme)
        with import_matplotlib().rc_context(_style(THEMES[theme])):
            for name in (file for file in FILES if file.startswith(theme)):
                kind = name.split(".")[1]
                buffer = io.BytesIO()
                # No date, so that the same results give the same file.
                figure.savefig(
                    buffer,
                    format=kind,
                    dpi=160,
                    bbox_inches="tight",
                    metadata={"Date": None} if kind == "svg" else None,
                )
                found[name] = buffer.getvalue()
        return found


class _Figures:
    """Makes figures as pyplot does, without a window for them."""

    @staticmethod
    def subplots(*grid: int, figsize: Any, layout: Any = None, **settings: Any) -> Any:
        figure = import_matplotlib().figure.Figure(figsize=figsize, layout=layout)
        return figure, figure.subplots(*grid, **settings)


def _style(colours: Mapping[str, Any]) -> Dict[str, Any]:
    ink, ground = colours["ink"], colours["ground"]
    return {
        "figure.facecolor": ground,
        "axes.facecolor": ground,
        "savefig.facecolor": ground,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "grid.color": colours["grid"],
        "axes.grid": True,
        "axes.axisbelow": True,
        "font.size": 11,
        "legend.frameon": True,
        "legend.facecolor": ground,
        "legend.edgecolor": ground,
        "svg.hashsalt": "spectral-fairseq",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
