"""Draw the picture of docs/speed.md, time and memory over plain fairseq, from its first table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

PAGE = Path(__file__).resolve().parents[1] / "docs" / "speed.md"
PICTURE = PAGE.parent / "images" / "speed.png"
SHAPES = {"small": "small model", "IWSLT": "IWSLT's size", "large": "large vocabulary"}
METHODS = ("likelihood", "spectrum control")
FUSED = "`fused_loss_` over transformers' loss"


class Ratio(NamedTuple):
    """A cell of the table: time with its range, where there is one, and memory."""

    time: float
    low: Optional[float]
    high: Optional[float]
    memory: float


_CELL = re.compile(r"([\d.]+)(?: \(([\d.]+) to ([\d.]+)\))?, ([\d.]+)")


def ratio(cell: str) -> Ratio:
    """The figures of a cell such as ``0.73 (0.68 to 0.83), 0.73``.

    Raises:
        ValueError: a cell of another form.
    """
    found = _CELL.match(cell)
    if found is None:
        raise ValueError(f"expected a ratio of time and of memory, found {cell!r}")
    time, low, high, memory = (None if one is None else float(one) for one in found.groups())
    assert time is not None and memory is not None
    return Ratio(time, low, high, memory)


def rows(page: str) -> Dict[str, Ratio]:
    """The bars by their labels: the default on a CPU in each shape, and the fused loss."""
    table = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line] for line in table]
    shapes = [re.sub(r" \S$", "", name) for name in cells[0][1:4]]
    found: Dict[str, Ratio] = {}
    for method in METHODS:
        line = next(one for one in cells if one[0] == method)  # first comes the default
        for shape, cell in zip(shapes, line[1:]):
            found[f"{method}, {SHAPES[shape]}"] = ratio(cell)
    line = next(one for one in cells if one[0] == FUSED)
    found["fused loss, GPT-2's table\nover transformers' loss"] = ratio(
        next(filter(None, line[1:]))
    )
    return found


def draw(picture: Path = PICTURE) -> None:
    """Draw two bars for each row, time and memory, and the range of the time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = rows(PAGE.read_text("utf-8"))
    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    labels: List[str] = list(found)
    for row, one in enumerate(found.values()):
        first = row == 0
        axes.barh(-row + 0.2, one.time, 0.36, color="#0072B2", label="time" if first else None)
        axes.barh(-row - 0.2, one.memory, 0.36, color="#9CC7E2", label="memory" if first else None)
        if one.low is not None and one.high is not None:
            reach = [[one.time - one.low], [one.high - one.time]]
            axes.errorbar(one.time, -row + 0.2, xerr=reach, color="black", capsize=3, linewidth=1.2)
        axes.text((one.high or one.time) + 0.01, -row + 0.2, f"{one.time:.2f}", va="center")
        axes.text(one.memory + 0.01, -row - 0.2, f"{one.memory:.2f}", va="center")
    axes.set_yticks([-row for row in range(len(labels))], labels, fontsize=9)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlim(0, 1.15)
    axes.set_xlabel("over plain fairseq on a CPU (1: the same)")
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    picture.parent.mkdir(exist_ok=True)
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    draw()
