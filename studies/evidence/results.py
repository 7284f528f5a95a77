"""What the records of a study amount to: figures of finished trainings by method and seed."""

from __future__ import annotations

from typing import Any, List, Mapping, Sequence, Tuple

from studies import tables
from studies.evidence.grid import Study
from studies.evidence.plan import WITH_SIMCUT, Cell, Choices, Stage, stages
from studies.evidence.records import Records

Reached = Sequence[Tuple[Stage, Choices]]


def own_records(study: Study, records: Records) -> List[Mapping[str, Any]]:
    """All records but those that belong to another study."""
    return [one for one in records.values() if one["method"] not in study.elsewhere]


def tuned_methods(reached: Reached, records: Records) -> List[str]:
    """The methods whose settings are all recorded; the tables of these do not wait for others."""
    cells = stage_cells(reached, "tuning")
    missing = {cell.method for cell in cells if cell.name not in records}
    return sorted({cell.method for cell in cells} - missing)


def reached_stages(study: Study, records: Records) -> Reached:
    """The stages of the methods that are tuned, as far as the records go."""
    return list(stages(study, records, tuned_methods(list(stages(study, records)), records)))


def stage_cells(reached: Reached, *names: str) -> List[Cell]:
    """The trainings of some stages."""
    return [cell for stage, _ in reached if stage.name in names for cell in stage.cells]


def label(study: Study, method: str) -> str:
    """Name of a method in tables and figures."""
    if method == WITH_SIMCUT:
        return "the best table method and SimCut"
    return study.methods[method].label


def final_results(reached: Reached, records: Records) -> tables.Results:
    """Figures of the trainings with the seeds of the tables: method -> seed -> figures."""
    results: tables.Results = {}
    for cell in stage_cells(reached, "seed", "simcut"):
        record = records.get(cell.name, {"diverged": True})
        if not record.get("diverged"):
            figures = tables.flat(record)
            # Early stopping ends each training at another update.
            figures.pop("updates", None)
            results.setdefault(cell.method, {})[cell.seed] = figures
    return results
