"""Draw the picture of docs/speed.md, time and memory over plain fairseq, from the page's tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

PAGE = Path(__file__).resolve().parents[1] / "docs" / "speed.md"
PICTURE = PAGE.parent / "images" / "speed.png"
SHAPES = {"small": "small model", "IWSLT": "IWSLT's size", "large": "large vocabulary"}
METHODS = ("likelihood", "spectrum control")
FAST = "--bf16 --fast-dropout"
FUSED = "`fused_loss_` over transformers' loss, GPT-2's table"
DARK, LIGHT = "#0072B2", "#9CC7E2"


class Ratio(NamedTuple):
    """A cell of a table: time with its range, where there is one, and memory, where it is known."""

    time: float
    low: Optional[float]
    high: Optional[float]
    memory: Optional[float]


Group = Tuple[str, Dict[str, Ratio]]
_CELL = re.compile(r"([\d.]+)(?: \(([\d.]+) to ([\d.]+)\))?(?:, ([\d.]+))?")


def ratio(cell: str) -> Ratio:
    """The figures of a cell such as ``0.73 (0.68 to 0.83), 0.73``.

    Raises:
        ValueError: a cell of another form.
    """
    found = _CELL.fullmatch(cell)
    if found is None:
        raise ValueError(f"expected a ratio of time and perhaps of memory, found {cell!r}")
    time, low, high, memory = (None if one is None else float(one) for one in found.groups())
    assert time is not None
    return Ratio(time, low, high, memory)


def groups(page: str) -> List[Group]:
    """The bars by their labels: in float32, in bfloat16 on a Xeon with AMX, and the fused loss."""
    lines = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line] for line in lines]
    heads = [re.sub(r" \S$", "", name) for name in cells[0][1:4]]
    float32 = {
        f"{method}, {SHAPES[shape]}": ratio(cell)
        for method in METHODS
        for shape, cell in zip(heads, next(one for one in cells if one[0] == method)[1:])
    }
    (at,) = (row for row, one in enumerate(cells) if one[:2] == ["processor", "method"])
    columns = {name.split(",")[0]: i for i, name in enumerate(cells[at]) if FAST in name}
    xeon = next(row for row in range(at, len(cells)) if "AMX" in cells[row][0])
    bfloat16 = {
        f"{one[1]}, {SHAPES[shape]}": ratio(one[i])
        for shape, i in columns.items()
        for one in cells[xeon : xeon + len(METHODS)]
    }
    (fused,) = (one for one in cells if one[0] == FUSED)
    return [
        ("float32", float32),
        (f"{FAST}, Xeon with AMX", bfloat16),
        (
            "over transformers' loss",
            {"fused loss, GPT-2's table": ratio(next(filter(None, fused[1:])))},
        ),
    ]


def draw(picture: Path = PICTURE) -> None:
    """Draw the bars of time and memory of each row below its label: legible on a phone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    found = groups(PAGE.read_text("utf-8"))
    rows = sum(len(group) + 0.8 for _, group in found)
    figure, axes = pyplot.subplots(figsize=(3.9, 0.46 * rows + 0.8), layout="constrained")
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over the line at 1
    at = 0.0
    for heading, group in found:
        axes.text(0, -at, heading, fontsize=9.5, fontweight="bold", va="center", bbox=white)
        at += 0.8
        for label, one in group.items():
            axes.text(0, 0.2 - at, label, fontsize=9, va="center", bbox=white)
            axes.barh(-at - 0.13, one.time, 0.24, color=DARK)
            if one.low is not None and one.high is not None:
                reach = [[one.time - one.low], [one.high - one.time]]
                axes.errorbar(one.time, -at - 0.13, xerr=reach, color="black", capsize=2.5)
            end = (one.high or one.time) + 0.015
            axes.text(end, -at - 0.13, f"{one.time:.2f}", va="center", fontsize=8.5, bbox=white)
            if one.memory is not None:
                axes.barh(-at - 0.4, one.memory, 0.24, color=LIGHT)
                end = one.memory + 0.015
                axes.text(
                    end, -at - 0.4, f"{one.memory:.2f}", va="center", fontsize=8.5, bbox=white
                )
            at += 1
    axes.axvline(1, color="black", linewidth=0.8, zorder=0)
    axes.set_xlim(0, 1.15)
    axes.set_ylim(0.3 - at, 0.5)
    axes.set_yticks([])
    axes.set_xlabel("over plain fairseq in float32 on a CPU", fontsize=9)
    axes.tick_params(axis="x", labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = [Patch(color=DARK), Patch(color=LIGHT)]
    axes.legend(handles, ["time", "memory"], fontsize=9, loc="lower right", bbox_to_anchor=(1, 0.2))
    picture.parent.mkdir(exist_ok=True)
    figure.savefig(picture, dpi=200)
    pyplot.close(figure)


if __name__ == "__main__":
    draw()
