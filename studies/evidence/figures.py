"""The figures of the pages of this folder: learning curves of a study, and all comparisons."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
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
    figure, axes = pyplot.subplots(figsize=(3.9, 4.2), layout="constrained")
    for method in sorted(curves, key=lambda one: (one != "plain", one)):
        length = min(map(len, curves[method]))
        mean = np.mean([curve[:length] for curve in curves[method]], axis=0)
        style = {"color": "black", "linewidth": 2} if method == "plain" else {}
        seeds = f"{len(curves[method])} seed{'s' if len(curves[method]) > 1 else ''}"
        shown = f"{label(STUDIES[name], method)} ({seeds})"
        axes.plot(mean[:, 0], mean[:, 1], label=shown, **style)
    axes.set(xlabel="updates", ylabel="validation loss, bits per token", yscale="log")
    axes.tick_params(labelsize=9)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper left", fontsize=9, frameon=False)
    _save(figure, images / f"evidence_{name}.png")
    return True


_AXES = {"translation": "BLEU above plain", "language_model": "perplexity below plain"}
_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over the line at 0


def draw_overview(found: Sequence[Found], images: Path) -> None:
    """Draw every comparison with plain and its 95 % interval, if any; gains are on the right."""
    panels: Dict[str, List[Found]] = {}
    for one in found:
        if one.comparison.baseline == "plain":
            panels.setdefault(one.study.corpus, []).append(one)
    if not panels:
        return
    heights = [
        len(rows) + sum(1 + 0.55 * _heading(model).count("\n") for model in _models(rows))
        for rows in panels.values()
    ]
    figure, grid = pyplot.subplots(
        *(len(panels), 1),
        squeeze=False,
        figsize=(3.9, 1 + 0.35 * sum(heights)),
        height_ratios=heights,
        layout="constrained",
    )
    for axes, (corpus, rows) in zip(grid.flat, panels.items()):
        _draw_comparisons(axes, rows, 1 if corpus == "translation" else -1)
        axes.set_xlabel(_AXES[corpus], fontsize=9)
    grid[0, 0].legend(handles=_LEGEND, loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
    _save(figure, images / "evidence.png")


_COLOURS = {"gain": "tab:blue", "loss": "tab:orange", "no claim": "tab:gray"}
_LEGEND = [Line2D([], [], marker="o", color=one, label=text) for text, one in _COLOURS.items()]


def _models(found: Sequence[Found]) -> List[str]:
    return list(dict.fromkeys(one.study.model for one in found))


def _heading(model: str) -> str:
    return textwrap.fill(model, 44)


def _draw_comparisons(axes: Axes, found: Sequence[Found], sign: int) -> None:
    """A row for each comparison, below the name of its model; the largest gain comes first.

    Names are above their intervals, which so have the whole width: legible on a phone.
    """
    left = axes.get_yaxis_transform()  # x in shares of the width
    at = 0.0
    for model in _models(found):
        heading = _heading(model)
        axes.text(
            *(0, 0.3 - at, heading),
            fontsize=9.5, fontweight="bold", va="top", transform=left, bbox=_WHITE,
        )  # fmt: skip
        rows = [one for one in found if one.study.model == model]
        at += 0.55 * (1 + heading.count("\n")) + 0.35
        for one in sorted(rows, key=lambda one: -sign * one.comparison.test.mean):
            test, colour = one.comparison.test, _COLOURS[one.comparison.outcome(one.study)]
            ends = [[test.mean - test.low], [test.high - test.mean]][::sign]
            name = f"{one.method} ({one.comparison.seeds} seeds)"
            axes.text(0, 0.1 - at, name, fontsize=9, transform=left, bbox=_WHITE)
            axes.errorbar(
                *(sign * test.mean, -at - 0.25),
                xerr=ends, fmt="o", markersize=5, capsize=2.5, color=colour,
            )  # fmt: skip
            at += 1
        at += 0.1
    axes.axvline(0, color="black", linewidth=0.8, zorder=0)
    axes.set_ylim(-at + 0.3, 0.7)
    axes.set_yticks([])
    axes.tick_params(axis="x", labelsize=9)
    axes.grid(axis="x", alpha=0.3)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    pyplot.close(figure)
