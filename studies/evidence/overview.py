"""The comparisons of all studies together, with p adjusted for all of them."""

from __future__ import annotations

import math
from typing import List, Mapping, NamedTuple, Sequence

from studies import tables
from studies.evidence.comparison import MAIN_MEASURE, Comparison, compare, planned_comparisons
from studies.evidence.grid import Study
from studies.evidence.records import Records
from studies.evidence.results import final_results, label, own_records, reached_stages
from studies.significance import holm
from studies.text_tables import text_table


class Found(NamedTuple):
    """A comparison all of whose seeds are finished.

    Attributes:
        name: of its study.
        study: its study.
        comparison: what the study found.
        joint_p: p by Holm's method over the comparisons of all studies that have results.
        planned: how many comparisons those are.
    """

    name: str
    study: Study
    comparison: Comparison
    joint_p: float
    planned: int

    @property
    def method(self) -> str:
        """The method, and what it is compared with unless that is plain."""
        one = self.comparison
        against = "" if one.baseline == "plain" else f" against {label(self.study, one.baseline)}"
        return label(self.study, one.method) + against


def all_comparisons(studies: Mapping[str, Study], records: Mapping[str, Records]) -> List[Found]:
    """Every finished comparison, with plain or with another baseline; by study.

    Args:
        studies: by their names.
        records: those of each study.
    """
    started = {name: of for name, of in studies.items() if own_records(of, records[name])}
    planned = sum(map(planned_comparisons, started.values()))
    found = []
    for name, study in started.items():
        results = final_results(reached_stages(study, records[name]), records[name])
        for one in compare(study, results, {}, []):
            if one.seeds == len(study.seeds) and not one.is_refused:
                found.append((name, study, one))
    joint = joint_p([one.test.p for _, _, one in found], planned)
    return [Found(*one, p, planned) for one, p in zip(found, joint)]


def joint_p(ps: Sequence[float], planned: int) -> List[float]:
    """P by Holm's method over so many planned comparisons, of which those with ``ps`` were made."""
    # One that has not been made, or has no p, could have any.
    missing = planned - sum(not math.isnan(p) for p in ps)
    return holm([*ps, *[1.0] * missing])[: len(ps)]


def together_table(found: List[Found]) -> str:
    """The comparisons of all studies, those with the smallest p first."""
    rows = []
    for one in sorted(found, key=lambda one: one.comparison.test.p):
        test = one.comparison.test
        heading = tables.COLUMNS[MAIN_MEASURE[one.study.corpus]].heading
        difference = f"{test.mean:+.2f} ({test.low:+.2f} to {test.high:+.2f}) {heading}"
        ps = [tables.p_text(p) for p in (test.p, one.comparison.adjusted_p, one.joint_p)]
        rows.append([one.method, f"`{one.name}`", difference, *ps])
    if not rows:
        return ""
    heads = ["method", "study", "difference", "p", "Holm in its study"]
    return text_table(rows, [*heads, f"Holm over all {found[0].planned}"], "pipe") + "\n"
