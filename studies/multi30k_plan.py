"""What studies/multi30k.md plans, as data: trainings, what they choose, and what is compared.

Every choice is made by BLEU on validation with one seed, which no final training has. A plan grows
with the records: the trainings of a step are known once those that decide about them are recorded.
"""

from __future__ import annotations

import math
import statistics
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from studies import tables
from studies.significance import PairedT
from studies.text_tables import text_table

Record = Mapping[str, Any]

UPDATES, TUNING_SEED = 2500, 1
SEEDS = (2_100_000, 2_200_000, 2_300_000, 2_400_000, 2_500_000)
BATCH = "--max-tokens 4096 --update-freq 2"
"""Two batches of 4,096 tokens an update, as the published recipe has on two GPUs."""

PLAIN = "--arch transformer --criterion regularized_cross_entropy"
_INITIALISED = f"{PLAIN} --arch transformer_wn"


class Arm(NamedTuple):
    """What is trained: its name in tables, and the flags of all its trainings."""

    label: str
    flags: str


ARMS: Dict[str, Arm] = {
    "plain": Arm("plain", PLAIN),
    "no_smoothing": Arm("label smoothing 0", f"{PLAIN} --label-smoothing 0"),
    "low_dropout": Arm("dropout 0.1", f"{PLAIN} --dropout 0.1"),
    "rdrop_1": Arm("R-Drop, weight 1", f"{PLAIN} --rdrop-weight 1"),
    "rdrop_5": Arm("R-Drop, weight 5", f"{PLAIN} --rdrop-weight 5"),
    "wn_init": Arm("weight-norm initialisation", _INITIALISED),
    "muon": Arm("Muon", f"{PLAIN} --optimizer muon"),
    "muon_wn_init": Arm("Muon with the initialisation", f"{_INITIALISED} --optimizer muon"),
}
CONTROLS = ("no_smoothing", "low_dropout", "rdrop_1", "rdrop_5")
_OPTIONS = {"sigma": "--weight-norm-init-sigma", "decay": "--weight-decay", "lr": "--lr"}
# letter -> what it is; the final trainings
FINALS = {
    "D": "plain with its best weight decay",
    "W": "weight-norm initialisation",
    "M": "Muon",
    "MW": "Muon with the initialisation",
}
PRIMARY = (("W", "D"), ("MW", "D"))
SECONDARY = (
    *(("M", "D"), ("MW", "W"), ("MW", "M"), ("R", "D"), ("MW", "D, as long")),
    *(("label smoothing 0", "plain"), ("dropout 0.1", "plain")),
)
BLEU, OF_RAW_TEXT, LOSS = "bleu", ("raw_sacrebleu", "raw_chrf"), "valid_ppl"
"""Figures of a record: what decides, and what stands beside it."""
SCORES = (BLEU, *OF_RAW_TEXT)
MATTERS = 0.5
"""BLEU on validation from which on a control is trained with more seeds."""


class Training(NamedTuple):
    """One training."""

    arm: str
    options: Tuple[Tuple[str, float], ...] = ()
    seed: int = TUNING_SEED
    updates: int = UPDATES

    @property
    def flags(self) -> str:
        """Those of the arm, then its own."""
        own = [f"{_OPTIONS[name]} {value:g}" for name, value in self.options]
        return " ".join([ARMS[self.arm].flags, *own])

    @property
    def name(self) -> str:
        """What its record and its folder are called, but for the kind of machine."""
        own = [f"{name}{value:g}" for name, value in self.options]
        return "_".join([self.arm, *own, str(self.updates), str(self.seed)])

    @property
    def setting(self) -> str:
        """Its options in words."""
        return ", ".join(f"{name} {value:g}" for name, value in self.options)


def training(arm: str, **options: float) -> Training:
    """A training with the tuning seed; a weight decay of 0 is fairseq's default and is left out."""
    kept = {name: options[name] for name in _OPTIONS if options.get(name)}
    return Training(arm, tuple(kept.items()))


class Plan:
    """The trainings that are due or recorded, and the settings that are chosen.

    Attributes:
        steps: trainings by the heading of their step.
        chosen: a letter of :data:`FINALS`, or R for R-Drop, and its training with the tuning seed.
        arms: trainings over which seeds are compared, by the letter or label of a comparison.

    Args:
        records: of one kind of machine, by :attr:`Training.name`.
    """

    def __init__(self, records: Mapping[str, Record]) -> None:
        self.records = records
        self.steps: Dict[str, List[Training]] = {}
        self.chosen: Dict[str, Training] = {}
        self.arms: Dict[str, List[Training]] = {}
        self._controls()
        decay = self._tune("D", "plain", "decay", (0, 0.1, 0.2, 0.4), (None, 0.8))
        if decay is not None:
            self.chosen["D"] = decay
        self._tune_the_initialisation()
        rates = ("lr", (0.005, 0.01), (0.0025, 0.02))
        muon = self._tune("M", "muon", *rates, decay=0.1)
        if muon is not None:
            self.chosen["M"] = muon
        if "W" in self.chosen:
            sigma = dict(self.chosen["W"].options)["sigma"]
            both = self._tune("MW", "muon_wn_init", *rates, decay=0.1, sigma=sigma)
            if both is not None:
                self.chosen["MW"] = both
        self._finals()

    def due(self) -> List[Training]:
        """Trainings that nothing keeps from being started, in the order of the plan."""
        every = dict.fromkeys(one for step in self.steps.values() for one in step)
        return [one for one in every if one.name not in self.records]

    def _score(self, one: Training) -> float:
        return float(self.records[one.name]["valid_bleu"])

    def _recorded(self, trainings: Sequence[Training]) -> bool:
        return all(one.name in self.records for one in trainings)

    def _controls(self) -> None:
        plain, *controls = (training(arm) for arm in ("plain", *CONTROLS))
        self.steps["controls"] = [plain, *controls]
        if not self._recorded([plain, *controls]):
            return
        dropped = [one for one in controls if one.arm.startswith("rdrop")]
        self.chosen["R"] = max(dropped, key=self._score)
        differences = {one: abs(self._score(one) - self._score(plain)) for one in controls}
        for one in controls:
            if one not in dropped and differences[one] >= MATTERS:
                self._seeds(ARMS[one.arm].label, one, SEEDS[:3], "controls, more seeds")
                self._seeds("plain", plain, SEEDS[:3], "controls, more seeds")

    def _tune(
        self,
        letter: str,
        arm: str,
        option: str,
        values: Sequence[float],
        beyond: Tuple[Optional[float], Optional[float]],
        **fixed: float,
    ) -> Optional[Training]:
        """The best of a grid, one step outwards where an end wins; None until all is recorded."""
        tried = [training(arm, **fixed, **{option: value}) for value in values]
        step = self.steps.setdefault(f"tuning of {letter}", [])
        step += [one for one in tried if one not in step]
        if not self._recorded(tried):
            return None
        best = max(tried, key=self._score)
        ends = {tried[0]: beyond[0], tried[-1]: beyond[1]}
        if ends.get(best) is None:
            return best
        further = training(arm, **fixed, **{option: ends[best] or 0})
        step.append(further)
        return max(best, further, key=self._score) if self._recorded([further]) else None

    def _tune_the_initialisation(self) -> None:
        decays = ("decay", (0, 0.1, 0.2), (None, 0.4))
        best = self._tune("W", "wn_init", *decays, sigma=0.1)
        if best is None:
            return
        decay = dict(best.options).get("decay", 0)
        # No arm has more trials than plain and two: one step outwards in all.
        beyond = (0.05, 0.2) if decay <= 0.2 else (None, None)
        tuned = self._tune("W", "wn_init", "sigma", (0.07, 0.1, 0.15), beyond, decay=decay)
        if tuned is not None:
            self.chosen["W"] = tuned

    def _seeds(self, label: str, one: Training, seeds: Sequence[int], step: str) -> None:
        self.arms[label] = [one._replace(seed=seed) for seed in seeds]
        known = self.steps.setdefault(step, [])
        known += [each for each in self.arms[label] if each not in known]

    def _finals(self) -> None:
        for letter in FINALS:
            if letter in self.chosen:
                self._seeds(letter, self.chosen[letter], SEEDS, "finals")
        if {"R", "D"} <= set(self.chosen):
            decay = self.chosen["D"].options
            self._seeds("R", self.chosen["R"]._replace(options=decay), SEEDS[:3], "R-Drop")
        if {"D", "MW"} <= set(self.arms) and self._recorded([*self.arms["D"], *self.arms["MW"]]):
            ratio = self.time_ratio("MW", "D")
            if math.isnan(ratio):
                return
            updates = 62 * round(UPDATES * ratio / 62)
            longer = self.chosen["D"]._replace(updates=updates)
            self._seeds("D, as long", longer, SEEDS[:3], "equal time")

    def time_ratio(self, label: str, baseline: str) -> float:
        """Processor time of an arm's trainings over that of another's: the median over the seeds.

        The time of a training of which a part was killed is not known; NaN where none is.
        """
        times: List[Dict[int, float]] = [
            {
                one.seed: self.records[one.name]["processor_seconds"]
                for one in self.arms[arm]
                if "processor_seconds" in self.records[one.name]
            }
            for arm in (label, baseline)
        ]
        longer, plain = times
        ratios = [longer[seed] / plain[seed] for seed in longer if seed in plain]
        return statistics.median(ratios) if ratios else math.nan

    def results(self) -> tables.Results:
        """The figures of the recorded seeds of each compared arm."""
        found: tables.Results = {}
        for label, trainings in self.arms.items():
            for one in trainings:
                if one.name in self.records:
                    record = self.records[one.name]
                    scores = set.intersection(*map(set, record["tests"].values()))
                    means = {score: mean(record, score) for score in {*SCORES} & scores}
                    figures = {**tables.flat(record), **means}
                    found.setdefault(label, {})[one.seed] = figures
        return found

    def comparisons(
        self, pairs: Sequence[Tuple[str, str]], figure: str = BLEU
    ) -> Dict[Tuple[str, str], tables.Difference]:
        """The differences of a figure, for the pairs of which all seeds have it."""
        results = self.results()
        complete = [
            pair
            for pair in pairs
            if all(self.arms.get(label) for label in pair)
            and all(len(results.get(label, ())) == len(self.arms[label]) for label in pair)
            and all(figure in run for label in pair for run in results[label].values())
        ]
        return tables.differences(results, complete, figure, len(pairs))


def mean(record: Record, score: str) -> float:
    """The mean of a score over the three test sets."""
    return statistics.fmean(float(one[score]) for one in record["tests"].values())


def plan_table(plan: Plan) -> str:
    """The trainings of each step, those whose settings are known; recorded ones are counted."""
    rows = []
    for step, trainings in plan.steps.items():
        recorded = sum(one.name in plan.records for one in trainings)
        what = dict.fromkeys(
            f"{ARMS[one.arm].label}{f' ({one.setting})' if one.setting else ''}"
            for one in trainings
        )
        rows.append([step, "; ".join(what), f"{recorded} of {len(trainings)}"])
    return text_table(rows, ["step", "trainings", "recorded"], "pipe") + "\n"


def arms_table(records: Sequence[Record]) -> str:
    """BLEU of every record on validation and on the test sets, with its loss and its time."""
    rows = []
    for one in records:
        tests = [f"{test['bleu']:.2f}" for test in one["tests"].values()]
        # Unknown of a training of which a part was killed.
        hours = one.get("processor_seconds", 0) / 3600
        rows.append(
            [
                f"`{one['name']}`",
                f"{one['valid_bleu']:.2f}",
                *tests,
                f"{mean(one, BLEU):.2f}",
                f"{one['valid_ppl']:.3f}",
                f"{hours:.2f}" if hours else "",
            ]
        )
    heads = ["training", "validation", "2016", "2017", "COCO", "mean", "valid ppl", "hours"]
    return text_table(rows, heads, "pipe") + "\n"


def penalty_sentence(records: Sequence[Record]) -> str:
    """What a length penalty that is chosen on validation changes there and on the test sets."""
    gains = [
        one["valid_bleu_by_penalty"][str(one["length_penalty"])] - one["valid_bleu"]
        for one in records
    ]
    tests = [test for one in records for test in one["tests"].values()]
    changes = [test["bleu_tuned_penalty"] - test["bleu"] for test in tests]
    lower, higher = sum(one < 0 for one in changes), sum(one > 0 for one in changes)
    return (
        f"A length penalty chosen on validation adds up to {max(gains):.1f} BLEU there. On the "
        f"test sets it changes BLEU by {statistics.fmean(changes):+.2f} on average: of "
        f"{len(changes)} scores {lower} are lower and {higher} higher.\n"
    )


def comparison_table(plan: Plan) -> str:
    """The primary comparisons, adjusted for their number, then the secondary ones."""
    beside = (*OF_RAW_TEXT, LOSS)
    rows = []
    for kind, pairs in (("primary", PRIMARY), ("secondary", SECONDARY)):
        others = [plan.comparisons(pairs, figure) for figure in beside]
        for pair, (test, p) in plan.comparisons(pairs).items():
            ratio = plan.time_ratio(*pair)
            rows.append(
                [
                    f"{' − '.join(pair)}, {kind}",
                    _interval(test),
                    tables.p_text(test.p),
                    tables.p_text(p) if kind == "primary" else "",
                    *(_interval(found[pair].test) if pair in found else "" for found in others),
                    "" if math.isnan(ratio) else f"{ratio:.2f}",
                ]
            )
    if not rows:
        return "No comparison has all its seeds yet.\n"
    heads = ["comparison", "mean BLEU", "p", f"Holm over {len(PRIMARY)}", "raw sacreBLEU"]
    heads += ["raw chrF", "validation perplexity", "processor time, ratio"]
    return text_table(rows, heads, "pipe") + "\n"


def _interval(test: PairedT) -> str:
    return f"{test.mean:+.2f} ({test.low:+.2f} to {test.high:+.2f})"
