"""The tables and figures of the pages of this folder, from the records of the studies alone."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

import numpy as np

from studies import tables
from studies.evidence.comparison import MAIN_MEASURE, compare, planned_comparisons
from studies.evidence.grid import STUDIES, Method, Recipe, Setting, Study
from studies.evidence.overview import Found, all_comparisons, together_table
from studies.evidence.plan import Cell
from studies.evidence.records import Records, records_of
from studies.evidence.results import (
    Reached,
    final_results,
    label,
    own_records,
    reached_stages,
    stage_cells,
)
from studies.pages import with_generated
from studies.text_tables import text_table
from studies.work_folder import write_text

FOLDER = Path(__file__).parent
PAGES = tuple(FOLDER / f"{name}.md" for name in ("README", "studies", "protocol"))
IMAGES = FOLDER / "images"
STAGES = {
    "recipe": "tuning of the recipe",
    "tuning": "tuning of the methods",
    "seed": "seeds of the tables",
    "simcut": "with SimCut",
}

# The first is the one on which methods are compared.
MEASURES = {
    "translation": ["bleu", "chrf", "ter", "rare_recall", "valid_ppl"],
    "language_model": ["test_ppl", "rare_test_ppl", "valid_ppl"],
}
_TABLE = ("seconds_per_update", "peak_bytes", "mean_cosine", "sigma_last_to_first")
_ISOTROPY = ("isotropy_as_is.I1_both_signs", "isotropy_as_is.I2_both_signs")
COSTS = {
    "best_update": tables.Column("best update", tables.digits(0)),
    **{name: tables.COLUMNS[name] for name in (*_TABLE, *_ISOTROPY)},
    "effective_rank": tables.Column("effective rank", tables.digits(1)),
}

_OTHER = re.compile(r"other_tests\.(.+)\.bleu")


def write_pages(results: Path, pages: Sequence[Path] = PAGES, images: Path = IMAGES) -> str:
    """Draw the figures and write every generated part of the pages; returns what was done."""
    from studies.evidence import figures

    found = all_records(results)
    drawn = [name for name in found if figures.draw_curves(name, found[name], images)]
    figures.draw_overview(compared(results), images)
    for page in pages:
        text = page.read_text("utf-8")
        write_text(page, with_generated(text, lambda name: part(name, results)))
    return f"{', '.join(page.name for page in pages)} and {len(drawn) + 1} figures written\n"


def all_records(results: Path) -> Dict[str, Records]:
    """The records of every study, by its name."""
    return {name: records_of(results, name, study) for name, study in STUDIES.items()}


def compared(results: Path) -> List[Found]:
    """The comparisons of all studies."""
    return all_comparisons(STUDIES, all_records(results))


def part(name: str, results: Path) -> str:
    """A generated part of a page, such as the plan or the results of a study."""
    if name == "plan":
        return plan_table()
    if name == "grid":
        return grid_table()
    if name == "seeds":
        return seeds_list()
    if name == "together":
        return together_table(compared(results))
    return section(name, STUDIES[name], records_of(results, name, STUDIES[name]))


def planned_trainings(study: Study) -> Dict[str, int]:
    """How many trainings of its own each stage of a study has."""
    own = [method for name, method in study.methods.items() if name not in study.elsewhere]
    settings = sum(len(method.settings) for method in own)
    return {
        "recipe": bool(study.rounds) + sum(map(len, study.rounds)),
        # The best training of the recipe is plain's in the tuning.
        "tuning": settings - bool(study.rounds) if study.tuned else 0,
        "seed": len(study.seeds) * len(own),
        "simcut": len(study.seeds) * study.with_simcut,
    }


def plan_table() -> str:
    """How many trainings each study has."""
    rows = []
    for name, study in STUDIES.items():
        parts = list(planned_trainings(study).values())
        rows.append([f"`{name}`", *map(str, [*parts, sum(parts)])])
    head = ["study", "recipe", "tuning", "seeds", "with SimCut", "trainings"]
    return text_table(rows, head, "pipe") + "\n"


def seeds_list() -> str:
    """With how many seeds the studies train what stands in their tables."""
    of: Dict[int, List[str]] = {}
    for name, study in STUDIES.items():
        of.setdefault(len(study.seeds), []).append(f"`{name}`")
    return "".join(f"- {count} seeds: {', '.join(of[count])}.\n" for count in sorted(of))


def setting_text(method: Method, setting: Setting) -> str:
    """A setting as Markdown: the flags that are added, and the factor of the learning rate."""
    parts = [f"`{setting.flags}`"] if setting.flags else []
    if any(one.lr_factor != 1 for one in method.settings):
        parts.append(f"learning rate × {setting.lr_factor:g}")
    return " ".join(parts) or "nothing more"


def grid_table() -> str:
    """The settings of every method, with the studies that have it."""
    found: Dict[Tuple[str, str], List[str]] = {}
    for name, study in STUDIES.items():
        for method in study.methods.values():
            tried = [setting_text(method, setting) for setting in method.settings]
            cells = f"`{method.flags}` | {'; '.join(tried)}"
            found.setdefault((method.label, cells), []).append(f"`{name}`")
    lines = ["| method | flags | settings | studies |", "|---|---|---|---|"]
    lines += [f"| {label} | {cells} | {', '.join(of)} |" for (label, cells), of in found.items()]
    return "\n".join(lines) + "\n"


def section(name: str, study: Study, records: Records) -> str:
    """Everything that one study has found so far, as Markdown."""
    if not own_records(study, records):
        return f"`{name}`: not run yet.\n"
    reached = reached_stages(study, records)
    results = final_results(reached, records)
    parts = [progress(study, records, results), recipe_table(study, reached, records)]
    parts += [tuning_table(study, reached, records)]
    if results.get("plain"):
        present = tables.columns_of(results)
        shown = [column for column in MEASURES[study.corpus] if column in present]
        parts += [comparison_table(study, reached, records, results)]
        named = {label(study, method): runs for method, runs in results.items()}
        parts += [tables.markdown(named, None, shown)]
        parts += [difference_table(study, named, shown[1:])]
        parts += [other_tests_table(study, named)]
        parts += [cost_table(named)]
        if (IMAGES / f"evidence_{name}.png").exists():
            picture, says = f"images/evidence_{name}.png", f"Validation loss of {name}"
            parts += [f'<img src="{picture}" width="390" alt="{says}">\n']
    return "\n".join(part for part in parts if part)


def progress(study: Study, records: Records, results: tables.Results) -> str:
    """How many trainings of each stage are recorded, what is missing, and which diverged."""
    done = Counter(record["stage"] for record in own_records(study, records))
    parts = [
        f"{STAGES[stage]} {done[stage]} of {planned}"
        for stage, planned in planned_trainings(study).items()
        if planned
    ]
    lines = [f"Trainings that are recorded: {'; '.join(parts)}."]
    missing = [study.methods[name].label for name in study.methods if name not in results]
    if missing:
        lines.append(f"Not yet in the tables: {', '.join(missing)}.")
    diverged = Counter(one["method"] for one in records.values() if one.get("diverged"))
    for method, count in diverged.items():
        lines.append(f"Trainings of {label(study, method)} that diverged: {count}.")
    return "\n".join(lines) + "\n"


def _score(records: Records, cell: Cell) -> str:
    record = records.get(cell.name)
    if record is None:
        return ""
    score = record.get("valid_score")
    return "diverged" if score is None else f"{abs(score):.2f}"


def _score_name(study: Study) -> str:
    return "BLEU on valid" if study.corpus == "translation" else "valid ppl"


def _words(recipe: Recipe) -> str:
    return ", ".join(f"{flag} {value}" for flag, value in recipe.items())


def recipe_table(study: Study, reached: Reached, records: Records) -> str:
    """The rounds of the recipe: what was tried with plain, and its validation score."""
    rows = []
    rounds = [(stage, choices) for stage, choices in reached if stage.name == "recipe"]
    for number, (stage, choices) in enumerate(rounds, 1):
        for cell in stage.cells:
            before = {str(key): str(value) for key, value in choices.recipe.items()}
            changed = [f"{k} {v}" for k, v in cell.recipe if before.get(k) != v]
            rows.append([str(number), ", ".join(changed) or "unchanged", _score(records, cell)])
    if not rows:
        return ""
    tried = text_table(rows, ["round", "plain with", _score_name(study)], "pipe")
    parts = [f"The first guess of the recipe: {_words(study.recipe)}.", "", tried, ""]
    if reached[-1][0].name != "recipe":
        parts += [f"The frozen recipe: {_words(reached[-1][1].recipe)}.", ""]
    return "\n".join(parts)


def tuning_table(study: Study, reached: Reached, records: Records) -> str:
    """Validation scores of every setting of every method; the chosen one is bold."""
    cells = stage_cells(reached, "tuning")
    rows = []
    for name in dict.fromkeys(cell.method for cell in cells):
        method, chosen = study.methods[name], reached[-1][1].settings.get(name)
        of_method = [cell for cell in cells if cell.method == name]
        for setting, cell in zip(method.settings, of_method):
            score = _score(records, cell)
            shown = f"**{score}**" if setting == chosen else score
            rows.append([method.label, setting_text(method, setting), shown])
    if not rows:
        return ""
    return text_table(rows, ["method", "setting", _score_name(study)], "pipe") + "\n"


def comparison_table(
    study: Study,
    reached: Reached,
    records: Records,
    results: tables.Results,
) -> str:
    """The main measure of each method beside another's, and what may be claimed."""
    translated: Dict[str, Dict[int, List[str]]] = {}
    reference: List[str] = []
    if study.corpus == "translation":
        reference = records.text("reference")
        for cell in stage_cells(reached, "seed", "simcut"):
            if not records.get(cell.name, {"diverged": True}).get("diverged"):
                translated.setdefault(cell.method, {})[cell.seed] = records.text(cell.name)
    rows = []
    for one in compare(study, results, translated, reference):
        test, segments = one.test, one.segments
        has_test = not math.isnan(test.p)
        names = [label(study, method) for method in (one.method, one.baseline)]
        row = [*names, str(one.seeds), f"{test.mean:+.2f}" if has_test else ""]
        row += [f"{test.low:+.2f} to {test.high:+.2f}" if has_test else ""]
        row += [tables.p_text(one.adjusted_p)]
        if segments is not None:
            found = segments.interval
            row += [f"{found.low:+.2f} to {found.high:+.2f}" if found else ""]
            row += [str(segments.better), str(segments.worse)]
        elif translated:
            row += [""] * 3
        rows.append([*row, one.verdict(study)])
    if not rows:
        return ""
    heading = tables.COLUMNS[MAIN_MEASURE[study.corpus]].heading
    heads = ["method", "against", "seeds", f"difference in {heading}", "95 %, Student's t"]
    heads += [f"p, Holm over {planned_comparisons(study)}"]
    if translated:
        heads += ["95 %, seeds and segments", "seeds better", "seeds worse"]
    return text_table(rows, [*heads, "verdict"], "pipe") + "\n"


def difference_table(study: Study, results: tables.Results, columns: Sequence[str]) -> str:
    """Differences from plain in the other measures, each with its interval and adjusted p."""
    options = (planned_comparisons(study), len(study.seeds))
    of = {column: tables.differences_from(results, "plain", column, *options) for column in columns}
    rows = []
    for method in sorted(set(results) - {"plain"}):
        row = [method]
        for column in columns:
            show, found = tables.COLUMNS[column].show, of[column].get(method)
            if found is None or math.isnan(found.adjusted_p):
                row.append("")
                continue
            test = found.test
            interval = f"{show(test.low)} to {show(test.high)}"
            row.append(f"{show(test.mean)} ({interval}; p {tables.p_text(found.adjusted_p)})")
        rows.append(row)
    if not rows:
        return ""
    heads = [f"{tables.COLUMNS[column].heading} minus plain's" for column in columns]
    return text_table(rows, ["method", *heads], "pipe") + "\n"


def other_tests_table(study: Study, results: tables.Results) -> str:
    """BLEU of each method on the other test sets, and its differences from plain."""
    every = [run for runs in results.values() for run in runs.values()]
    columns = sorted({key for run in every for key in run if _OTHER.fullmatch(key)})
    rows = []
    for column in columns:
        found = tables.differences_from(
            results, "plain", column, planned_comparisons(study), len(study.seeds)
        )
        for method in sorted(results, key=lambda name: (name != "plain", name)):
            values = [run[column] for run in results[method].values() if column in run]
            row = [_OTHER.sub(r"\1", column), method, f"{np.mean(values):.1f}" if values else ""]
            of = found.get(method)
            if of is not None and not math.isnan(of.adjusted_p):
                interval = f"{of.test.low:+.2f} to {of.test.high:+.2f}"
                row.append(f"{of.test.mean:+.2f} ({interval}; p {tables.p_text(of.adjusted_p)})")
            rows.append(row)
    if not rows:
        return ""
    heads = ["other test set", "method", "sacreBLEU", "minus plain's"]
    return text_table([[*row, ""][:4] for row in rows], heads, "pipe") + "\n"


def cost_table(results: tables.Results) -> str:
    """Means over seeds: updates, time and memory of the trainings, measures of the tables."""
    rows = []
    for method in sorted(results, key=lambda name: (name != "plain", name)):
        row = [method]
        for name, column in COSTS.items():
            found = tables.cell([run[name] for run in results[method].values() if name in run])
            row.append("" if found is None else column.show(found.mean))
        rows.append(row)
    heads = [column.heading for column in COSTS.values()]
    return text_table(rows, ["method", *heads], "pipe") + "\n"
