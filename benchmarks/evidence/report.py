"""The tables and figures of docs/evidence.md, from the records of the studies alone."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import numpy as np

from benchmarks.corpora import ROOT
from benchmarks.evidence.grid import STUDIES, Study
from benchmarks.evidence.plan import WITH_SIMCUT, Cell, Choices, Stage, stages
from benchmarks.evidence.records import Records
from benchmarks.evidence.scoring import bleu_counts, bleu_of_sums
from benchmarks.pages import with_generated
from spectral_fairseq_examples import tables
from spectral_fairseq_examples.common.significance import holm, seeds_and_segments
from spectral_fairseq_examples.common.text_tables import text_table
from spectral_fairseq_examples.common.workdir import write_text

PAGE = ROOT / "docs" / "evidence.md"
IMAGES = ROOT / "docs" / "images"
NOTHING = "No training of this study has been recorded.\n"

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


def write_page(results: Path, page: Path = PAGE, images: Path = IMAGES) -> str:
    """Write every generated part of the page, and the figures; returns what was done."""
    text = page.read_text("utf-8")
    write_text(page, with_generated(text, lambda name: part(name, results)))
    drawn = [name for name in STUDIES if draw_curves(name, Records(results / name), images)]
    return f"{page} and {len(drawn)} figures written\n"


def part(name: str, results: Path) -> str:
    """A generated part of the page: the plan, the settings, or the results of a study."""
    if name == "plan":
        return plan_table()
    if name == "grid":
        return grid_table()
    return section(name, STUDIES[name], Records(results / name))


def plan_table() -> str:
    """How many trainings each study has."""
    rows = []
    for name, study in STUDIES.items():
        recipe = 1 + sum(map(len, study.rounds))
        tuning = sum(len(method.settings) for method in study.methods.values()) - 1
        seeds = len(study.seeds) * len(study.methods)
        simcut = len(study.seeds) * study.with_simcut
        parts = (recipe, tuning, seeds, simcut, recipe + tuning + seeds + simcut)
        rows.append([f"`{name}`", *map(str, parts)])
    head = ["study", "recipe", "tuning", "seeds", "with SimCut", "trainings"]
    return text_table(rows, head, "pipe") + "\n"


def grid_table() -> str:
    """The settings of every method, with the studies that have it."""
    found: Dict[Tuple[str, str], List[str]] = {}
    for name, study in STUDIES.items():
        for method in study.methods.values():
            tried = []
            for flags, factor in method.settings:
                rate = (
                    f"learning rate × {factor:g}"
                    if any(s.lr_factor != 1 for s in method.settings)
                    else ""
                )
                tried.append(
                    " ".join(part for part in (f"`{flags}`" if flags else "", rate) if part)
                )
            cells = f"`{method.flags}` | {'; '.join(one or 'nothing more' for one in tried)}"
            found.setdefault((method.label, cells), []).append(f"`{name}`")
    lines = ["| method | flags | settings | studies |", "|---|---|---|---|"]
    lines += [f"| {label} | {cells} | {', '.join(of)} |" for (label, cells), of in found.items()]
    return "\n".join(lines) + "\n"


def section(name: str, study: Study, records: Records) -> str:
    """Everything that one study has found so far, as Markdown."""
    if not records:
        return NOTHING
    every = list(stages(study, records))
    reached = list(stages(study, records, tuned_methods(every, records)))
    results = final_results(reached, records)
    parts = [progress([*every, *reached], records), recipe_table(study, reached, records)]
    parts += [tuning_table(study, reached, records)]
    if results.get("plain"):
        present = tables.columns_of(results)
        shown = [column for column in MEASURES[study.corpus] if column in present]
        parts += [tables.markdown(results, "plain", shown, test=True)]
        parts += [difference_table(results, shown[1:])]
        if study.corpus == "translation":
            parts += [bootstrap_table(reached, records)]
        if {"simcut", WITH_SIMCUT} <= set(results):
            both = {name: results[name] for name in ("simcut", WITH_SIMCUT)}
            parts += [tables.markdown(both, "simcut", shown[:1], test=True)]
        parts += [cost_table(results)]
        if (IMAGES / f"evidence_{name}.png").exists():
            parts += [f"![Validation loss of {name}](images/evidence_{name}.png)\n"]
    return "\n".join(part for part in parts if part)


def tuned_methods(reached: Sequence[Tuple[Stage, Choices]], records: Records) -> List[str]:
    """The methods of which every setting is recorded; others do not keep these from the tables."""
    cells = _stage_cells(reached, "tuning")
    missing = {cell.method for cell in cells if cell.name not in records}
    return sorted({cell.method for cell in cells} - missing)


def _stage_cells(reached: Sequence[Tuple[Stage, Choices]], *names: str) -> List[Cell]:
    return [cell for stage, _ in reached if stage.name in names for cell in stage.cells]


def final_results(reached: Sequence[Tuple[Stage, Choices]], records: Records) -> tables.Results:
    """Figures of the trainings with the seeds of the tables: method -> seed -> figures."""
    results: tables.Results = {}
    for cell in _stage_cells(reached, "seed", "simcut"):
        record = records.get(cell.name, {"diverged": True})
        if not record.get("diverged"):
            figures = tables.flat(record)
            # Early stopping ends each training at another update.
            figures.pop("updates", None)
            results.setdefault(cell.method, {})[cell.seed] = figures
    return results


def progress(reached: Sequence[Tuple[Stage, Choices]], records: Records) -> str:
    """How many trainings of each stage are recorded, and which diverged."""
    lines = []
    for name in dict.fromkeys(stage.name for stage, _ in reached):
        cells = dict.fromkeys(_stage_cells(reached, name))
        done = [cell for cell in cells if cell.name in records]
        diverged = [cell.name for cell in done if records[cell.name].get("diverged")]
        lines.append(f"- {name}: {len(done)} of {len(cells)} trainings")
        lines[-1] += f"; diverged: {', '.join(diverged)}" if diverged else ""
    return "\n".join(lines) + "\n"


def _score(records: Records, cell: Cell) -> str:
    record = records.get(cell.name)
    if record is None:
        return ""
    score = record.get("valid_score")
    return "diverged" if score is None else f"{abs(score):.2f}"


def _score_name(study: Study) -> str:
    return "BLEU on valid" if study.corpus == "translation" else "valid ppl"


def recipe_table(study: Study, reached: Sequence[Tuple[Stage, Choices]], records: Records) -> str:
    """The rounds of the recipe: what was tried with plain, and its validation score."""
    rows = []
    rounds = [(stage, choices) for stage, choices in reached if stage.name == "recipe"]
    for number, (stage, choices) in enumerate(rounds, 1):
        for cell in stage.cells:
            before = {str(key): str(value) for key, value in choices.recipe.items()}
            changed = [f"{k} {v}" for k, v in cell.recipe if before.get(k) != v]
            rows.append([str(number), ", ".join(changed) or "unchanged", _score(records, cell)])
    heads = ["round", "plain with", _score_name(study)]
    return text_table(rows, heads, "pipe") + "\n" if rows else ""


def tuning_table(study: Study, reached: Sequence[Tuple[Stage, Choices]], records: Records) -> str:
    """Validation scores of every setting of every method, in the order of the grid."""
    cells = _stage_cells(reached, "tuning")
    if not cells:
        return ""
    choices = reached[-1][1]
    rows = []
    for name in dict.fromkeys(cell.method for cell in cells):
        of = [_score(records, cell) for cell in cells if cell.method == name]
        setting = choices.settings.get(name)
        if setting in study.methods[name].settings:
            index = study.methods[name].settings.index(setting)
            of[index] = f"**{of[index]}**"
        rows.append([name, ", ".join(of)])
    return text_table(rows, ["method", f"{_score_name(study)}, by setting"], "pipe") + "\n"


def difference_table(results: tables.Results, columns: Sequence[str]) -> str:
    """Differences from plain in the other measures, each with its interval and adjusted p."""
    of = {column: tables.differences(results, "plain", column) for column in columns}
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
            row.append(f"{show(test.mean)} ({interval}; p {found.adjusted_p:.3f})")
        rows.append(row)
    if not rows:
        return ""
    heads = [f"{tables.COLUMNS[column].heading} less plain's" for column in columns]
    return text_table(rows, ["method", *heads], "pipe") + "\n"


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


def bootstrap_table(reached: Sequence[Tuple[Stage, Choices]], records: Records) -> str:
    """BLEU less plain's, over seeds and segments; and sacreBLEU's paired bootstrap by seed.

    Twice the median of p values is a p value, however these depend on each other (Rüger, 1978,
    https://doi.org/10.1007/BF01886165).
    """
    translated: Dict[str, Dict[int, List[str]]] = {}
    for cell in _stage_cells(reached, "seed", "simcut"):
        if not records.get(cell.name, {"diverged": True}).get("diverged"):
            translated.setdefault(cell.method, {})[cell.seed] = records.text(cell.name)
    plain = translated.get("plain", {})
    reference = records.text("reference")
    counts = functools.lru_cache(None)(
        lambda method, seed: bleu_counts(translated[method][seed], reference)
    )
    rows, ps = [], []
    for method in sorted(set(translated) - {"plain"}):
        seeds = sorted(set(plain) & set(translated[method]))
        if not seeds:
            continue
        found = seeds_and_segments(
            np.stack([counts("plain", seed) for seed in seeds]),
            np.stack([counts(method, seed) for seed in seeds]),
            bleu_of_sums,
            resamples=2_000,
        )
        by_seed = [
            paired_bootstrap(plain[seed], translated[method][seed], reference) for seed in seeds
        ]
        clear = [p < 0.05 for p in by_seed]
        better = [
            one
            and bleu_of_sums(counts(method, seed).sum(0))
            > bleu_of_sums(counts("plain", seed).sum(0))
            for one, seed in zip(clear, seeds)
        ]
        ps.append(min(1.0, 2 * float(np.median(by_seed))))
        rows.append(
            [
                *(method, f"{found.value:+.2f}", f"{found.low:.2f} to {found.high:.2f}"),
                *(f"{sum(better)}, {sum(clear) - sum(better)} of {len(seeds)}", f"{ps[-1]:.3f}"),
            ]
        )
    if not rows:
        return ""
    for row, adjusted in zip(rows, holm(ps)):
        row.append(f"{adjusted:.3f}")
    heads = ["method", "BLEU less plain's", "95 %, seeds and segments"]
    heads += ["better, worse with p < 0.05", "twice the median p", "Holm"]
    return text_table(rows, heads, "pipe") + "\n"


def paired_bootstrap(
    baseline: Sequence[str], system: Sequence[str], reference: Sequence[str]
) -> float:
    """P of sacreBLEU's paired bootstrap (1,000 resamples of the segments) for two systems.

    Of equal translations it is 1; sacreBLEU counts the resamples with more than no difference, and
    would say 0.001.
    """
    if list(baseline) == list(system):
        return 1.0
    from sacrebleu.metrics import BLEU
    from sacrebleu.significance import PairedTest

    systems = [("plain", list(baseline)), ("system", list(system))]
    _, found = PairedTest(systems, {"BLEU": BLEU()}, [list(reference)], test_type="bs")()
    return float(found["BLEU"][1].p_value)


def draw_curves(name: str, records: Mapping[str, Mapping[str, Any]], images: Path) -> bool:
    """Draw the mean validation loss of each method over the updates; False without results.

    A mean is drawn up to the update that all seeds of the method have reached.
    """
    curves: Dict[str, List[List[List[float]]]] = {}
    for record in records.values():
        if record.get("stage") in ("seed", "simcut") and not record.get("diverged"):
            curves.setdefault(record["method"], []).append(record["curve"])
    if not curves:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for method in sorted(curves, key=lambda one: (one != "plain", one)):
        length = min(map(len, curves[method]))
        mean = np.mean([curve[:length] for curve in curves[method]], axis=0)
        style = {"color": "black", "linewidth": 2} if method == "plain" else {}
        axes.plot(mean[:, 0], mean[:, 1], label=method, **style)
    axes.set(xlabel="updates", ylabel="validation loss, bits a token", yscale="log")
    axes.legend(fontsize=7, ncols=2)
    images.mkdir(parents=True, exist_ok=True)
    figure.savefig(images / f"evidence_{name}.png", dpi=100, bbox_inches="tight")
    pyplot.close(figure)
    return True
