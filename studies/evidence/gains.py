"""The picture of what translation models gain and lose over plain fairseq, beside weight decay.

python -m studies.evidence.gains
"""

from __future__ import annotations

from pathlib import Path
from typing import List, Mapping, NamedTuple, Optional, Tuple

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from spectral_fairseq.errors import DataError
from studies import multi30k, tables
from studies.evidence.grid import STUDIES
from studies.evidence.overview import Found
from studies.evidence.records import records_of
from studies.evidence.report import compared
from studies.evidence.results import final_results, reached_stages
from studies.multi30k_plan import PRIMARY
from studies.significance import PairedT
from studies.tables import Difference

matplotlib.use("Agg")

RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parent / "images" / "gains.png"
DECAY, LONG = "translation_decay_small", "translation_start_long"
METHODS, MEDIUM = "translation_methods_small", "translation_medium"
SMALL, MUON = "translation_small", "translation_muon_small"
DARK, LIGHT = "#0072B2", "#9CC7E2"
_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over the axis


class Gain(NamedTuple):
    """A row: the method of one study, and what it is compared with.

    Attributes:
        text: of the row.
        study: of the method.
        method: its key.
        plain: the study with the trainings of plain, where it is not the method's own; the
            comparison was not planned then.
    """

    text: str
    study: str
    method: str
    plain: Optional[str] = None


_START = "weight-norm initialisation"
GROUPS: Tuple[Tuple[str, Tuple[Gain, ...]], ...] = (
    (
        "Software help, over plain with a tuned decay",
        (
            Gain("Muon + initialisation, about 1.3 × the time", MUON, "muon_init"),
            Gain(f"{_START}, 20,000 updates", LONG, "weight_norm_init"),
            Gain("Muon alone, about 1.3 × the time", MUON, "muon"),
            Gain(_START, DECAY, "weight_norm_init"),
            Gain("weight-norm regularisation, no decay", METHODS, "weight_norm", DECAY),
            Gain(f"{_START}, 31,000 pairs", MEDIUM, "weight_norm_init"),
            Gain("spectrum control", DECAY, "renewed"),
            Gain("weight-norm regularisation with decay", DECAY, "weight_norm"),
        ),
    ),
    (
        "Software help, over plain without decay",
        (
            Gain("R-Drop, twice the time", METHODS, "rdrop"),
            Gain("adversarial softmax", METHODS, "adversarial"),
            Gain("cosine regularisation", METHODS, "cosine"),
            Gain("spectrum control, decoupled", SMALL, "decoupled"),
            Gain("mixture of softmaxes", METHODS, "mixture"),
            Gain("SimCut, twice the time", SMALL, "simcut"),
        ),
    ),
)


# On Multi30k, over plain with its own tuned weight decay: an arm of its plan, and the text.
ON_MULTI30K = {
    "MW": "Muon + initialisation",
    "W": _START,
    "M": "Muon alone",
    "R": "R-Drop, twice the time",
}


class Row(NamedTuple):
    """What is drawn of a row, and whether p stays below 0.05 among all comparisons of its plan."""

    text: str
    test: PairedT
    claimed: bool


def rows_of(gains: Tuple[Gain, ...], found: List[Found]) -> List[Row]:
    """The rows of a group, the largest gain first."""
    planned = {
        (one.name, one.comparison.method): one
        for one in found
        if one.comparison.baseline == "plain"
    }
    rows = []
    for gain in gains:
        if gain.plain is None:
            one = planned[gain.study, gain.method]
            rows.append(Row(gain.text, one.comparison.test, one.joint_p < 0.05))
        else:
            rows.append(Row(gain.text, difference(gain), False))
    return sorted(rows, key=lambda row: -row.test.mean)


def rows_on_multi30k(compared: Mapping[Tuple[str, str, str], Difference]) -> List[Row]:
    """The rows of Multi30k, the largest gain first; none before its trainings are recorded.

    Its plan has two primary comparisons, which are adjusted for each other alone. The others claim
    nothing.

    Args:
        compared: from ``multi30k.compared``.
    """
    several = len({where for where, *_ in compared}) > 1
    rows = [
        Row(
            ON_MULTI30K[arm] + (f", {where}" if several else ""),
            one.test,
            (arm, baseline) in PRIMARY and one.adjusted_p < 0.05,
        )
        for (where, arm, baseline), one in compared.items()
        if baseline == "D" and arm in ON_MULTI30K
    ]
    return sorted(rows, key=lambda row: -row.test.mean)


def difference(gain: Gain, results: Path = RESULTS, measure: str = "bleu") -> PairedT:
    """The differences from plain, seed by seed.

    Raises:
        DataError: the trainings name two kinds of machines.
    """
    both = {
        method: _finals(study, results)[method]
        for method, study in ((gain.method, gain.study), ("plain", gain.plain or gain.study))
    }
    named = tables.machines(both, *both)
    if len(named) > 1:
        raise DataError(
            f"trainings of {gain.text} and of plain on one kind of machine",
            " and ".join(named),
            "Rounding alone makes another training: compare trainings of one kind.",
        )
    return tables.differences_from(both, "plain", measure)[gain.method].test


def _finals(name: str, results: Path) -> tables.Results:
    records = records_of(results, name, STUDIES[name])
    return final_results(reached_stages(STUDIES[name], records), records)


def draw(picture: Path = PICTURE) -> None:
    """Draw a bar with its 95 % interval for each row, below its text: legible on a phone."""
    found = compared(RESULTS)
    groups = [(heading, rows_of(gains, found)) for heading, gains in GROUPS]
    on_multi30k = rows_on_multi30k(multi30k.compared())
    if on_multi30k:
        groups.insert(0, ("Multi30k, over plain with a tuned decay", on_multi30k))
    lines = sum(len(rows) + 0.8 for _, rows in groups)
    figure, axes = pyplot.subplots(figsize=(3.9, 0.35 * lines + 1.2), layout="constrained")
    at = 0.0
    for heading, rows in groups:
        axes.text(-2.4, -at, heading, fontsize=9.5, fontweight="bold", va="center", bbox=_WHITE)
        at += 0.8
        for row in rows:
            _draw_row(axes, row, -at)
            at += 1
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlim(-2.5, 6.4)
    axes.set_ylim(-at + 0.2, 0.6)
    axes.set_yticks([])
    axes.set_xlabel("BLEU above plain fairseq, with 95 % intervals", fontsize=9)
    axes.tick_params(axis="x", labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    planned = found[0].planned
    handles = [Patch(color=DARK), Patch(color=LIGHT)]
    labels = [f"holds among all\n{planned} comparisons\n(Multi30k: 2)", "does not: open"]
    axes.legend(handles, labels, fontsize=9, loc="lower right", bbox_to_anchor=(1, 0.03))
    figure.savefig(picture, dpi=200)
    pyplot.close(figure)


def _draw_row(axes: Axes, row: Row, at: float) -> None:
    test = row.test
    axes.text(-2.4, at + 0.12, row.text, fontsize=9, va="bottom", bbox=_WHITE)
    bar = at - 0.12
    axes.barh(bar, test.mean, color=DARK if row.claimed else LIGHT, height=0.34)
    reach = [[test.mean - test.low], [test.high - test.mean]]
    axes.errorbar(test.mean, bar, xerr=reach, color="black", capsize=2.5, linewidth=1.1)
    end = max(test.high, 0) + 0.1
    axes.text(end, bar, f"{test.mean:+.2f}".replace("-", "−"), va="center", fontsize=8.5)


if __name__ == "__main__":
    draw()
