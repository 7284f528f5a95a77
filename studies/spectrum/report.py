"""The tables and the picture of README.md in this folder, from the records alone."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from studies.json_lines import read_records
from studies.pages import with_generated
from studies.spectrum.figure import draw
from studies.spectrum.grid import NO_PENALTY, TASKS, VARIANTS, Key
from studies.text_tables import text_table
from studies.work_folder import write_text

FOLDER = Path(__file__).parent
PAGE = FOLDER / "README.md"
IMAGES = FOLDER / "images"
RESULTS = FOLDER / "results.jsonl"
Record = Dict[str, Any]
# Of a table; the last one of an SVD table only.
MEASURES = ("mean_cosine", "sigma_1_to_rms", "sigma_d_to_sigma_1", "largest_relative_error")


def key_of(record: Record) -> Key:
    """Which training a record is of."""
    return record["task"], record["variant"], record["seed"]


def recorded(path: Path = RESULTS) -> List[Record]:
    """The records of a file, ordered by task, variant and seed; none where there is no file."""
    return sorted(read_records(path), key=key_of)


def rows(records: Sequence[Record]) -> List[Dict[str, Any]]:
    """A row for each variant of each task: means over seeds, against plain with the same seeds.

    ``behind`` is how many bits the validation loss is above plain's at the end, ``deviation`` the
    standard deviation of that over the seeds (of plain's own loss for plain), ``curve`` the same
    after each number of updates, and ``most_behind`` the largest of it. ``beside_plain`` says
    whether no point of it is further behind than a standard deviation of plain's own losses.
    """
    found = []
    for task in TASKS:
        of_task = [one for one in records if one["task"] == task]
        plain = {one["seed"]: _losses(one) for one in of_task if one["variant"] == "plain"}
        spreads = [_deviation(at) for at in zip(*plain.values())]
        for variant in VARIANTS:
            runs = [one for one in of_task if one["variant"] == variant]
            if not runs:
                continue
            behind = [
                [ours - theirs for ours, theirs in zip(_losses(run), plain[run["seed"]])]
                for run in runs
                if run["seed"] in plain
            ]
            means = [statistics.mean(at) for at in zip(*behind)]
            last = [_losses(run)[-1] for run in runs]
            compared = last if variant == "plain" else [curve[-1] for curve in behind]
            within = [mean <= spread for mean, spread in zip(means, spreads) if spread is not None]
            updates = [point["update"] for point in runs[0]["curve"]]
            measures = [name for name in MEASURES if name in runs[0]]
            found.append(
                {
                    "task": task,
                    "variant": variant,
                    "seeds": len(runs),
                    "nll_bits": statistics.mean(last),
                    "curve": dict(zip(updates, means)),
                    "behind": means[-1] if means else None,
                    "deviation": _deviation(compared),
                    "most_behind": max(means, default=None),
                    "beside_plain": all(within) if within else None,
                    **{name: statistics.mean(run[name] for run in runs) for name in measures},
                }
            )
    return found


def _losses(record: Record) -> List[float]:
    return [point["nll_bits"] for point in record["curve"]]


def _deviation(numbers: Sequence[float]) -> Optional[float]:
    return statistics.stdev(numbers) if len(numbers) > 1 else None


def markdown(records: Sequence[Record]) -> str:
    """A line for each variant, with a cell for each task."""
    if not records:
        return "No training of this study has been recorded.\n"
    cells = {(row["variant"], row["task"]): row for row in rows(records)}
    lines = []
    for variant, flags in VARIANTS.items():
        of_variant = [cells.get((variant, task)) for task in TASKS]
        seeds = sorted({row["seeds"] for row in of_variant if row})
        if seeds:
            added = flags if variant == "plain" else flags.replace(NO_PENALTY, "").strip()
            table = f"{variant.replace('_', ' ')}: `{added}`"
            lines.append([table, ", ".join(map(str, seeds)), *map(_cell, of_variant)])
    heads = ["table", "seeds", *(task.title for task in TASKS.values())]
    return text_table(lines, heads, "pipe") + "\n"


def renewal(records: Sequence[Record]) -> str:
    """How far factored tables are behind plain ones over the updates; how true their sigma are."""
    found = [row for row in rows(records) if row["variant"] in ("factored", "factored_renewed")]
    updates = sorted({update for row in found for update in row["curve"]})
    lines = []
    for row in found:
        behind = [row["curve"].get(update) for update in updates]
        cells = ["" if bits is None else _signed(bits) for bits in behind]
        error = f"{100 * row['largest_relative_error']:.1f} %"
        name = row["variant"].replace("_", ", ")
        lines.append([TASKS[row["task"]].title, name, str(row["seeds"]), *cells, error])
    heads = ["model", "table", "seeds", *(f"{update:,}" for update in updates)]
    return text_table(lines, [*heads, "largest error of a stored σ"], "pipe") + "\n"


def _cell(row: Any) -> str:
    if row is None:
        return ""
    spread = "" if row["deviation"] is None else f" ± {row['deviation']:.3f}"
    if row["variant"] == "plain" or row["behind"] is None:
        loss = f"{row['nll_bits']:.3f}{spread}"
    else:
        loss = f"{_signed(row['behind'])}{spread} ({_signed(row['most_behind'])})"
        loss = f"**{loss}**" if row["beside_plain"] else loss
    cosine = round(row["mean_cosine"], 3) + 0.0  # without the sign of a zero
    return f"{loss}; {cosine:.3f}, {row['sigma_1_to_rms']:.2f}"


def _signed(number: float) -> str:
    return f"{number:+.3f}".replace("-", "−")


def page_text(records: Sequence[Record], page: Path = PAGE) -> str:
    """The page with its tables made anew."""
    parts = {"spectrum_study": markdown, "spectrum_renewal": renewal}
    return with_generated(page.read_text("utf-8"), lambda name: parts[name](records))


def write_page(records: Sequence[Record], page: Path = PAGE, images: Path = IMAGES) -> None:
    """Put the tables between the markers of the page, and draw its picture."""
    write_text(page, page_text(records, page))
    draw(rows(records), images / "spectrum-forms.png")
