"""The picture at the top of README: a degenerate and a healthy table, from two real trainings.

    python -m studies.cone                       # draw docs/images/tables.png anew
    python -m studies.cone PLAIN.pt CONTROL.pt   # measure two checkpoints first

Both are those of ``transformer_lm_small`` with its first seed: plain, and decoupled spectrum
control with the default settings. ``studies/cone.json`` has what is drawn of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import torch
import torch.nn.functional as F

from spectral_fairseq.analysis import analyze
from spectral_fairseq.checkpoints.reading import load_checkpoint
from studies.training_data import ROOT
from studies.work_folder import write_text

RECORD, PICTURE = ROOT / "studies" / "cone.json", ROOT / "docs" / "images" / "tables.png"
SHOWN = 1200
BINS = 50
TITLES = ("degenerate", "healthy")
COLORS = ("#D55E00", "#0072B2")


def measure(path: Path) -> Dict[str, Any]:
    """What is drawn of a checkpoint's output table.

    Returns:
        ``points``: the directions of some words along the two singular vectors that hold most of
        all of them; ``cosines``: how often each cosine of two words occurs, from -1 to 1;
        ``mean_cosine`` of all words.
    """
    entries = load_checkpoint(path)["model"]
    table = entries["decoder.embed_tokens.weight"].double()[4:]  # without fairseq's own symbols
    directions = F.normalize(table)
    first, second = torch.linalg.svd(directions, full_matrices=False).Vh[:2]
    first = first * (directions @ first).mean().sign()  # upwards
    some = directions[torch.linspace(0, len(table) - 1, SHOWN).long()]
    points = torch.stack([some @ second, some @ first], 1)
    pairs = torch.triu_indices(SHOWN, SHOWN, offset=1)
    cosines = (some @ some.T)[pairs[0], pairs[1]]
    measured = analyze(path).to_dict()["checkpoints"][0]["measures"]
    return {
        "points": [[round(value, 2) for value in row] for row in points.tolist()],
        "cosines": torch.histc(cosines, BINS, -1, 1).int().tolist(),
        "mean_cosine": round(measured["mean_cosine"], 4),
    }


def draw(tables: Sequence[Dict[str, Any]], picture: Path = PICTURE) -> None:
    """Draw the words of each table above the cosines of its pairs; legible on a phone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Circle

    figure, grid = pyplot.subplots(
        2, 2, figsize=(3.9, 3.7), height_ratios=[2.1, 1], layout="constrained"
    )
    for column, (table, title, color) in enumerate(zip(tables, TITLES, COLORS)):
        above, below = grid[:, column]
        x, y = zip(*table["points"])
        above.scatter(x, y, s=2, color=color, alpha=0.5, linewidths=0)
        above.add_patch(Circle((0, 0), 1, fill=False, linewidth=0.8, color="0.6"))
        above.plot(0, 0, "k+", markersize=10)
        above.set(xlim=(-1.05, 1.05), ylim=(-1.05, 1.05), aspect="equal")
        above.axis("off")
        above.set_title(title, fontsize=12, fontweight="bold", color=color)
        edges = torch.linspace(-1, 1, BINS + 1).tolist()
        below.stairs(table["cosines"], edges, fill=True, color=color)
        below.axvline(0, color="black", linewidth=0.8)
        below.set(yticks=[], xticks=[-1, 0, 1], xlim=(-1, 1))
        mean = f"{table['mean_cosine'] + 0.0:.2f}".replace("-0.00", "0.00")
        below.set_xlabel(f"cosine of two words\nmean {mean}", fontsize=9.5)
        below.tick_params(labelsize=9)
        for side in ("top", "right", "left"):
            below.spines[side].set_visible(False)
    figure.savefig(picture, dpi=200)
    pyplot.close(figure)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; returns the exit status."""
    paths: List[Path] = [Path(one) for one in (sys.argv[1:] if argv is None else argv)]
    if paths:
        write_text(RECORD, f"{json.dumps([measure(path) for path in paths])}\n")
    draw(json.loads(RECORD.read_text("utf-8")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
