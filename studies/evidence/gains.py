"""The picture of README: what a translation model gains over plain fairseq with a tuned decay."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple

import matplotlib
from matplotlib import pyplot

from studies.evidence.grid import STUDIES
from studies.evidence.records import records_of
from studies.significance import PairedT, paired_t

matplotlib.use("Agg")

RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parent / "images" / "gains.png"
DECAY, LONG = "translation_decay_small", "translation_start_long"
METHODS, MEDIUM = "translation_methods_small", "translation_medium"
MUON = "translation_muon_small"


class Gain(NamedTuple):
    """A row: the method of one study, and the study whose plain trainings it is compared with."""

    text: str
    study: str
    method: str
    plain: str
    claimed: bool


_START = "weight-norm initialisation\n"
_SHORT = "10,000 pairs, 5,000 updates"
GAINS = (
    Gain(f"Muon with the initialisation\n{_SHORT}", MUON, "muon_init", DECAY, True),
    Gain(f"{_START}10,000 pairs, 20,000 updates", LONG, "weight_norm_init", LONG, True),
    Gain(f"{_START}{_SHORT}", DECAY, "weight_norm_init", DECAY, True),
    Gain(f"weight-norm regularisation, no decay\n{_SHORT}", METHODS, "weight_norm", DECAY, False),
    Gain(f"{_START}31,000 pairs, 5,000 updates", MEDIUM, "weight_norm_init", MEDIUM, False),
    Gain(f"spectrum control\n{_SHORT}", DECAY, "renewed", DECAY, False),
)
"""Claimed is what remains when all comparisons are adjusted together (overview.py)."""


def difference(gain: Gain, results: Path = RESULTS, measure: str = "bleu") -> PairedT:
    """The differences from plain, seed by seed."""
    of, plain = (
        _by_seed(study, method, measure, results)
        for study, method in ((gain.study, gain.method), (gain.plain, "plain"))
    )
    seeds = sorted(set(of) & set(plain))
    return paired_t([of[seed] - plain[seed] for seed in seeds])


def _by_seed(study: str, method: str, measure: str, results: Path) -> Dict[int, float]:
    records: Mapping[str, Mapping[str, Any]] = records_of(results, study, STUDIES[study])
    return {
        one["seed"]: one[measure]
        for one in records.values()
        if one["method"] == method and one["stage"] == "seed" and measure in one
    }


def draw(picture: Path = PICTURE) -> None:
    """Draw a bar with its 95 % interval for each row."""
    figure, axes = pyplot.subplots(figsize=(7.2, 3.0), layout="constrained")
    for row, gain in enumerate(GAINS):
        found = difference(gain)
        color = "#0072B2" if gain.claimed else "#9CC7E2"
        reach = [[found.mean - found.low], [found.high - found.mean]]
        axes.barh(-row, found.mean, color=color, height=0.62)
        axes.errorbar(found.mean, -row, xerr=reach, color="black", capsize=3, linewidth=1.2)
        axes.text(found.high + 0.08, -row, f"+{found.mean:.1f}", va="center", fontsize=10)
    axes.set_yticks([-row for row in range(len(GAINS))], [gain.text for gain in GAINS], fontsize=9)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("BLEU above plain fairseq with a tuned weight decay")
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    draw()
