"""The table of docs/spectrum.md, from the records alone."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Dict, List, Sequence

from benchmarks.corpora import ROOT
from benchmarks.pages import with_generated
from benchmarks.spectrum_study.grid import TASKS, VARIANTS
from benchmarks.spectrum_study.records import Record
from spectral_fairseq_examples.common.workdir import write_text

PAGE = ROOT / "docs" / "spectrum.md"
RESULTS = ROOT / "benchmarks" / "results" / "spectrum_study.json"


def rows(records: Sequence[Record]) -> List[Dict[str, Any]]:
    """A row for each variant of each task: means over seeds, against plain with the same seeds.

    ``behind`` is how many bits the validation loss is above plain's at the end, and ``most_behind``
    the most that it is at any point, each the mean over the seeds; ``deviation`` is the standard
    deviation of the loss at the end over the seeds.
    """
    found = []
    for task in TASKS:
        of_task = [one for one in records if one["task"] == task]
        plain = {one["seed"]: _losses(one) for one in of_task if one["variant"] == "plain"}
        for variant in VARIANTS:
            runs = [one for one in of_task if one["variant"] == variant]
            if not runs:
                continue
            last = [_losses(run)[-1] for run in runs]
            behind = [
                [ours - theirs for ours, theirs in zip(_losses(run), plain[run["seed"]])]
                for run in runs
                if run["seed"] in plain
            ]
            means = [statistics.mean(at) for at in zip(*behind)]
            measures = ("mean_cosine", "sigma_1_to_rms", "sigma_d_to_sigma_1")
            found.append(
                {
                    "task": task,
                    "variant": variant,
                    "seeds": len(runs),
                    "nll_bits": statistics.mean(last),
                    "deviation": statistics.stdev(last) if len(last) > 1 else None,
                    "behind": means[-1] if means else None,
                    "most_behind": max(means, default=None),
                    **{name: statistics.mean(run[name] for run in runs) for name in measures},
                }
            )
    return found


def _losses(record: Record) -> List[float]:
    return [point["nll_bits"] for point in record["curve"]]


def markdown(records: Sequence[Record]) -> str:
    """A line for each variant, with three cells for each task."""
    if not records:
        return "No training of this study has been recorded.\n"
    cells = {(row["variant"], row["task"]): row for row in rows(records)}
    heads = [f"{task.replace('_', ' ')} | cosine | σ_1 / RMS" for task in TASKS]
    lines = [f"| table | seeds | {' | '.join(heads)} |", "|---|---|" + "---|" * 3 * len(TASKS)]
    for variant, flags in VARIANTS.items():
        of_variant = [cells.get((variant, task)) for task in TASKS]
        seeds = sorted({row["seeds"] for row in of_variant if row})
        if seeds:
            shown = f"`{variant}`: `{flags}`"
            counts = ", ".join(map(str, seeds))
            lines.append(f"| {' | '.join([shown, counts, *map(_cells, of_variant)])} |")
    return "\n".join(lines) + "\n"


def _cells(row: Any) -> str:
    if row is None:
        return " | | "
    if row["variant"] == "plain":
        deviation = "" if row["deviation"] is None else f" ± {row['deviation']:.3f}"
        loss = f"{row['nll_bits']:.3f}{deviation}"
    elif row["behind"] is None:
        loss = f"{row['nll_bits']:.3f}"
    else:
        loss = f"{_signed(row['behind'])} ({_signed(row['most_behind'])})"
    cosine = round(row["mean_cosine"], 3) + 0.0  # without the sign of a zero
    return f"{loss} | {cosine:.3f} | {row['sigma_1_to_rms']:.2f}"


def _signed(number: float) -> str:
    return f"{number:+.3f}".replace("-", "−")


def write_page(records: Sequence[Record], page: Path = PAGE) -> None:
    """Put the table between the markers of the page."""
    write_text(page, with_generated(page.read_text("utf-8"), lambda _: markdown(records)))
