"""The picture of studies/spectrum: what each form costs, over how much it leaves to stand out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Mapping, Sequence

from studies.spectrum.grid import TASKS

# The start of a variant's name -> its family's marker and colour; the first that fits counts.
_FAMILIES = {
    "plain": ("plain", "s", "black"),
    "default": ("default", "*", "tab:red"),
    "above_1.5_fixed": ("fixed norm", "v", "tab:brown"),
    "both_fixed": ("fixed norm", "v", "tab:brown"),
    "above": ("above a bound", "o", "tab:blue"),
    "centred": ("centred, above a bound", "P", "tab:cyan"),
    "both": ("all to the prior", "D", "tab:purple"),
    "penalty": ("penalty on the true σ", "X", "tab:orange"),
    "factored_renewed": ("factored, renewed", "^", "tab:green"),
    "factored": ("factored, as in the paper", "<", "olive"),
}


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw a panel for each model, with a point for each variant.

    Args:
        rows: of :func:`studies.spectrum.report.rows`.
        path: of the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(TASKS), 1, figsize=(3.9, 8.6), layout="constrained")
    handles: Dict[str, Any] = {}
    for (task, of_task), axes in zip(TASKS.items(), panels):
        for row in rows:
            other_rate = row["variant"].endswith("sgd")
            if row["task"] == task and row["behind"] is not None and not other_rate:
                label, marker, colour = _family(row["variant"])
                size = 160 if marker == "*" else 45
                handles[label] = axes.scatter(
                    *(row["sigma_1_to_rms"], row["behind"]),
                    marker=marker, color=colour, s=size, zorder=3, label=label,
                )  # fmt: skip
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_yscale("symlog", linthresh=0.05)
        axes.set_ylim(-0.15, 2.5)
        axes.set_yticks([-0.1, 0, 0.05, 0.1, 0.2, 0.5, 1, 2], minor=False)
        axes.set_yticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_title(of_task.title, fontsize=10)
        axes.set_ylabel("bits behind plain ¹", fontsize=9)
        axes.tick_params(labelsize=9)
        axes.grid(alpha=0.3)
    panels[-1].set_xlabel(
        "σ_1 / RMS of the singular values\n¹ of validation loss; logarithmic beyond ±0.05",
        fontsize=9,
    )
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=2, fontsize=8, columnspacing=1
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    pyplot.close(figure)


def _family(variant: str) -> Any:
    return next(family for start, family in _FAMILIES.items() if variant.startswith(start))
