"""The figures of the pages of this folder: learning curves of a study, and all comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

from studies.evidence.grid import STUDIES
from studies.evidence.overview import Found
from studies.evidence.results import label

matplotlib.use("Agg")


def draw_curves(name: str, records: Mapping[str, Mapping[str, Any]], images: Path) -> bool:
    """Draw the mean validation loss of each method over the updates; False if there is none.

    A mean is drawn up to the update that all seeds of the method have reached.
    """
    curves: Dict[str, List[List[List[float]]]] = {}
    for record in records.values():
        if record.get("stage") in ("seed", "simcut") and not record.get("diverged"):
            curves.setdefault(record["method"], []).append(record["curve"])
    if not set(curves) - {"plain"}:
        return False
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for method in sorted(curves, key=lambda one: (one != "plain", one)):
        length = min(map(len, curves[method]))
        mean = np.mean([curve[:length] for curve in curves[method]], axis=0)
        style = {"color": "black", "linewidth": 2} if method == "plain" else {}
        seeds = f"{len(curves[method])} seed{'s' if len(curves[method]) > 1 else ''}"
        shown = f"{label(STUDIES[name], method)} ({seeds})"
        axes.plot(mean[:, 0], mean[:, 1], label=shown, **style)
    axes.set(xlabel="updates", ylabel="validation loss, bits per token", yscale="log")
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    _save(figure, images / f"evidence_{name}.png")
    return True


_AXES = {"translation": "BLEU above plain", "language_model": "perplexity below plain"}


def draw_overview(found: Sequence[Found], images: Path) -> None:
    """Draw every comparison with plain and its 95 % interval, if any; gains are on the right."""
    panels: Dict[str, List[Found]] = {}
    for one in found:
        if one.comparison.baseline == "plain":
            panels.setdefault(one.study.corpus, []).append(one)
    if not panels:
        return
    heights = [len(rows) + len({one.study.model for one in rows}) for rows in panels.values()]
    figure, grid = pyplot.subplots(
        *(len(panels), 1),
        squeeze=False,
        figsize=(6, 1 + 0.3 * sum(heights)),
        height_ratios=heights,
        layout="constrained",
    )
    for axes, (corpus, rows) in zip(grid.flat, panels.items()):
        _draw_comparisons(axes, rows, 1 if corpus == "translation" else -1)
        axes.set(xlabel=_AXES[corpus])
    _save(figure, images / "evidence.png")


def _draw_comparisons(axes: Axes, found: Sequence[Found], sign: int) -> None:
    """A row for each comparison, below the name of its model; the largest gain comes first."""
    names: List[str] = []
    headings: List[int] = []
    for model in dict.fromkeys(one.study.model for one in found):
        rows = [one for one in found if one.study.model == model]
        axes.axhline(-len(names), color="0.9", linewidth=14, zorder=0)
        headings.append(len(names))
        names.append(model)
        for one in sorted(rows, key=lambda one: -sign * one.comparison.test.mean):
            test, claim = one.comparison.test, one.comparison.is_significant
            color = ("tab:blue" if sign * test.mean > 0 else "tab:orange") if claim else "tab:gray"
            ends = [[test.mean - test.low], [test.high - test.mean]][::sign]
            axes.errorbar(sign * test.mean, -len(names), xerr=ends, fmt="o", color=color)
            names.append(f"{one.method} ({one.comparison.seeds} seeds)")
    axes.axvline(0, color="black", linewidth=1, zorder=1)
    axes.set_ylim(-len(names) + 0.5, 0.5)
    axes.set_yticks([-row for row in range(len(names))], names)
    for row in headings:
        axes.get_yticklabels()[row].set_fontweight("bold")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
