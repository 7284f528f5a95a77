"""How the methods of a study differ from plain in its main measure, and what may be claimed."""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from studies import tables
from studies.evidence.grid import Study
from studies.evidence.plan import WITH_SIMCUT
from studies.evidence.scoring import bleu_counts, bleu_of_sums
from studies.significance import Interval, PairedT, seeds_and_segments

MAIN_MEASURE = {"translation": "bleu", "language_model": "test_ppl"}

# method -> seed -> translations of the test set
Translations = Mapping[str, Mapping[int, Sequence[str]]]


class Segments(NamedTuple):
    """How a method and its baseline compare when the segments of the test set are resampled.

    Attributes:
        interval: of the mean difference of BLEU, over seeds and segments; of one seed, None.
        better: seeds with which the method is better, by sacreBLEU's paired bootstrap at 0.05.
        worse: seeds with which it is worse, by the same test.
    """

    interval: Optional[Interval]
    better: int
    worse: int


class Comparison(NamedTuple):
    """A method compared with a baseline.

    Attributes:
        method: name of the method.
        baseline: plain, or the second method of one of the study's contrasts.
        seeds: how many both have finished.
        test: of the differences of the main measure, seed by seed.
        adjusted_p: its p by Holm's method, over all comparisons that the study has planned; NaN
            as long as a seed is missing, which counts like a comparison that has not been made.
        segments: what resampling the test set says; None for language models.
        machines: the processors that the trainings name. Two kinds are not compared, because
            rounding alone makes another training on another processor.
    """

    method: str
    baseline: str
    seeds: int
    test: PairedT
    adjusted_p: float
    segments: Optional[Segments]
    machines: Sequence[str] = ()

    @property
    def is_refused(self) -> bool:
        """Whether the trainings ran on two kinds of machines."""
        return len(self.machines) > 1

    def verdict(self, study: Study) -> str:
        """What the protocol lets one say, or why nothing."""
        if self.is_refused:
            return f"refused: {' against '.join(self.machines)}"
        if self.seeds < len(study.seeds):
            return f"no claim with {self.seeds} of {len(study.seeds)} seeds"
        outcome = self.outcome(study)
        if outcome == "no claim":
            return outcome
        planned = (self.method, self.baseline) not in study.unplanned
        return f"**a {outcome}**" if planned else f"a {outcome}, not planned"

    def outcome(self, study: Study) -> str:
        """``gain`` or ``loss``, which need every interval and the p, or ``no claim``."""
        intervals = [(self.test.low, self.test.high)]
        if self.segments is not None and self.segments.interval is not None:
            intervals.append(self.segments.interval[1:])
        sign = 1 if study.corpus == "translation" else -1  # a lower perplexity is better
        if self.adjusted_p < 0.05:
            if all(sign * low > 0 < sign * high for low, high in intervals):
                return "gain"
            if all(sign * low < 0 > sign * high for low, high in intervals):
                return "loss"
        return "no claim"


def contrasts(study: Study) -> List[Tuple[str, str]]:
    """Pairs of methods that a study compares, the second one being the baseline."""
    return [*[(WITH_SIMCUT, "simcut")] * study.with_simcut, *study.contrasts]


def planned_comparisons(study: Study) -> int:
    """How many the study makes: each method and combination with plain, and the contrasts."""
    own = set(study.methods) - {"plain", *study.elsewhere}
    return len(own) + study.with_simcut + len(contrasts(study))


def compare(
    study: Study, results: tables.Results, translations: Translations, reference: Sequence[str]
) -> List[Comparison]:
    """Compare every method that has results with plain, and the pairs of the contrasts.

    Args:
        study: the study.
        results: the figures of the finished trainings with the seeds of the tables.
        translations: the same trainings' translations of the test set; none in language models.
        reference: of the test set.
    """
    if not results.get("plain"):  # every training of plain diverged, or none is finished
        return []
    own = set(results) - {"plain", *study.elsewhere}
    pairs = [(method, "plain") for method in sorted(own)]
    pairs += [pair for pair in contrasts(study) if set(pair) <= set(results)]
    tested = tables.differences(
        results, pairs, MAIN_MEASURE[study.corpus], planned_comparisons(study), len(study.seeds)
    )
    counts = functools.lru_cache(None)(
        lambda method, seed: bleu_counts(list(translations[method][seed]), list(reference))
    )
    found = []
    for (method, baseline), (test, p) in tested.items():
        seeds = sorted(set(results[baseline]) & set(results[method]))
        machines = tables.machines(results, method, baseline)
        segments = None
        if seeds and method in translations and len(machines) < 2:
            segments = _segments(method, baseline, seeds, translations, reference, counts)
        found.append(Comparison(method, baseline, len(seeds), test, p, segments, machines))
    return found


def _segments(
    method: str,
    baseline: str,
    seeds: List[int],
    translations: Translations,
    reference: Sequence[str],
    counts: Any,
) -> Segments:
    interval = None
    if len(seeds) > 1:
        interval = seeds_and_segments(
            np.stack([counts(baseline, seed) for seed in seeds]),
            np.stack([counts(method, seed) for seed in seeds]),
            bleu_of_sums,
            resamples=2_000,
        )
    clear: Dict[int, float] = {
        seed: bleu_of_sums(counts(method, seed).sum(0))
        - bleu_of_sums(counts(baseline, seed).sum(0))
        for seed in seeds
        if paired_bootstrap(translations[baseline][seed], translations[method][seed], reference)
        < 0.05
    }
    better = sum(difference > 0 for difference in clear.values())
    return Segments(interval, better, len(clear) - better)


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
