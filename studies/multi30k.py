"""One training of the study of Multi30k, its translations and its scores: studies/multi30k.md.

    python -m studies.multi30k due
    python -m studies.multi30k plain_2500_1 --data data-bin/multi30k.en-de --text TEXT --raw RAW
    python -m studies.multi30k report

``due`` names the trainings that this machine can start, which depend on what is recorded on its
kind: each kind of machine has a plan of its own. ``--data`` is what the commands of
examples/translation_multi30k_en_de make, ``--text`` the folder of the subwords that they read, and
``--raw`` holds the test sets as they were written (``test_2016_flickr.de`` and so on; without it
the scores on raw text are left out). After an interruption give the same command: a training goes
on from its checkpoint. ``report`` writes the tables of the page.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from benchmarks.harness import commit
from spectral_fairseq.errors import ConfigurationError
from studies import multi30k_plan
from studies.corpus import split_lines
from studies.json_lines import add_records, read_records
from studies.machine import check_installation
from studies.multi30k_plan import BATCH, FINALS, TUNING_SEED, Plan, Training
from studies.pages import with_generated
from studies.running import Job, exit_status, no_progress, run_jobs
from studies.tables import Difference, flat, machine
from studies.training import TrainingRun, versions
from studies.training_data import ROOT
from studies.translation import USER_DIR, TranslationProgress, read_translations
from studies.work_folder import WorkDir, write_text

RECORDS = ROOT / "studies" / "multi30k.jsonl"
PAGE = ROOT / "studies" / "multi30k.md"
_SIDE = "--{0}-layers 4 --{0}-embed-dim 128 --{0}-ffn-embed-dim 256 --{0}-attention-heads 4"
RECIPE = (
    f"--task translation --share-all-embeddings {_SIDE.format('encoder')} {_SIDE.format('decoder')}"
    " --label-smoothing 0.1 --dropout 0.3 --fast-dropout --optimizer adam --adam-betas (0.9,0.98)"
    f" --lr 0.005 {BATCH} --num-workers 0 --bf16"
)
TO_ZERO = (
    "--lr-scheduler polynomial_decay --warmup-updates 500 --end-learning-rate 0 --power 1"
    " --total-num-update {0} --max-update {0} --validate-interval 2 --keep-last-epochs 5"
)
CHECKPOINTS = 5
# The subset of fairseq's data, the file of subwords, and the file as it was written.
TEST_SETS = (
    ("test", "test.2016", "test_2016_flickr"),
    ("test1", "test.2017", "test_2017_flickr"),
    ("test2", "test.coco", "test_2017_mscoco"),
)
VALIDATION = ("valid", "valid", "")
PUBLISHED_PENALTY = 0.8
PENALTIES = (0.6, PUBLISHED_PENALTY, 1.0, 1.2, 1.5, 2.0)


def parse_arguments(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.multi30k",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", metavar="WHAT", help="due, report, or the name of a training that is due")
    add("--data", type=Path, metavar="DIR", help="binarised data")
    add("--text", type=Path, metavar="DIR", help="subwords: test.2016.de and so on")
    add("--raw", type=Path, metavar="DIR", help="the test sets as they were written")
    add("--threads", type=int, default=1, metavar="N", help="default: %(default)s")
    add("--work-dir", type=Path, default=Path("outputs/multi30k"), metavar="DIR")
    add("--gpu", action="store_true", help="the finals may have settings that a CPU has chosen")
    arguments = parser.parse_args(argv)
    if arguments.what not in ("due", "report") and not (arguments.data and arguments.text):
        parser.error("expected --data and --text with the name of a training; found none")
    return arguments


def device_of(arguments: argparse.Namespace) -> str:
    """``cuda`` with ``--gpu``, else ``cpu``."""
    return "cuda" if arguments.gpu else "cpu"


class Multi30kRun(TrainingRun):
    """A training, the mean of its last checkpoints, and what that translates.

    Args:
        one: the training.
        arguments: of the command line.
    """

    def __init__(self, one: Training, arguments: argparse.Namespace) -> None:
        self.one, self.arguments = one, arguments
        self.name = f"{one.name}_{device_of(arguments)}"
        schedule = TO_ZERO.format(one.updates)
        flags = shlex.split(f"{RECIPE} {schedule} {one.flags} --seed {one.seed}")
        work = WorkDir(arguments.work_dir.resolve() / self.name)
        folder = work.root
        command = ["fairseq-train", str(arguments.data), "--user-dir", USER_DIR, *flags]
        command += ["--save-dir", str(folder / "checkpoints")]
        command += ["--log-format", "json", "--log-interval", "62"]
        self.device = [] if arguments.gpu else ["--cpu"]
        super().__init__(
            *(self.name, work, folder, command + self.device),
            *(arguments.data, one.updates, one.updates, flags),
        )
        self.best = folder / "average.pt"

    def average(self) -> Job:
        """The job that averages the last checkpoints."""
        command = ["spectral-fairseq", "average", str(self.folder / "checkpoints"), "--overwrite"]
        command += ["--num-epoch-checkpoints", str(CHECKPOINTS), "--output", str(self.best)]
        return Job(self.label, command, self.folder / "average.log", 1, " average", no_progress)

    def translation(self, subset: str) -> Job:
        """The job that translates a set."""
        log = self.folder / f"{subset}.log"
        log.unlink(missing_ok=True)  # left by an interrupted run
        command = ["fairseq-generate", str(self.binary), "--user-dir", USER_DIR, "--remove-bpe"]
        command += ["--path", str(self.best), "--gen-subset", subset, "--batch-size", "128"]
        command += ["--beam", "5", "--nbest", "5", "--lenpen", str(PUBLISHED_PENALTY)]
        return Job(
            *(self.label, command + self.device, log, 1014, " sentences", TranslationProgress())
        )

    def references(self, file: str) -> List[str]:
        """The reference translations, tokenised and lower-cased."""
        lines = split_lines((self.arguments.text / f"{file}.de").read_bytes())
        return [line.replace("@@ ", "") for line in lines]

    def record(self) -> Dict[str, Any]:
        """Everything that is kept of this training."""
        from sacrebleu.metrics import BLEU, CHRF
        from sacremoses import MosesDetokenizer

        def hypotheses(subset: str, references: List[str], penalty: float) -> List[str]:
            return read_translations(self.folder / f"{subset}.log", len(references), penalty)

        tokenised = BLEU(tokenize="none", force=True)

        def bleu(subset: str, file: str, penalty: float) -> float:
            lines = self.references(file)
            found = tokenised.corpus_score(hypotheses(subset, lines, penalty), [lines])
            return round(found.score, 3)

        valid = {penalty: bleu(*VALIDATION[:2], penalty) for penalty in PENALTIES}
        tuned = max(valid, key=valid.__getitem__)
        detokenise = MosesDetokenizer("de").detokenize
        raw_bleu, raw_chrf = BLEU(lowercase=True), CHRF(lowercase=True)
        tests: Dict[str, Any] = {}
        for subset, file, raw in TEST_SETS:
            tests[file] = {"bleu": bleu(subset, file, PUBLISHED_PENALTY)}
            tests[file]["bleu_tuned_penalty"] = bleu(subset, file, tuned)
            if self.arguments.raw is None:
                continue
            lines = split_lines((self.arguments.raw / f"{raw}.de").read_bytes())
            found = hypotheses(subset, lines, PUBLISHED_PENALTY)
            text = [detokenise(line.split()) for line in found]
            for name, metric in (("raw_sacrebleu", raw_bleu), ("raw_chrf", raw_chrf)):
                score = metric.corpus_score(text, [lines])
                tests[file][name] = round(score.score, 3)
                tests[file][f"{name}_signature"] = str(metric.get_signature())
            tests[file]["translations"] = found
        return {
            "name": self.name,
            "arm": self.one.arm,
            "seed": self.one.seed,
            "device": device_of(self.arguments),
            "flags": " ".join(self.flags),
            **{key: value for key, value in self.figures().items() if key != "singular_values"},
            "valid_bleu": valid[PUBLISHED_PENALTY],
            "valid_bleu_by_penalty": {str(key): value for key, value in valid.items()},
            "length_penalty": tuned,
            "tests": tests,
            "versions": {**versions(), "commit": commit()},
        }


def records() -> List[Dict[str, Any]]:
    """What has been recorded."""
    return read_records(RECORDS)


def by_machine(recorded: Sequence[Dict[str, Any]]) -> Dict[str, Dict[str, Dict[str, Any]]]:
    """The records of the plan, by the kind of machine and the name of the training."""
    found: Dict[str, Dict[str, Dict[str, Any]]] = {}
    for one in recorded:
        if "device" in one:  # others are those from before this plan
            name = one["name"].rpartition("_")[0]
            found.setdefault(str(machine(flat(one))), {})[name] = one
    return found


def plan_of(recorded: Sequence[Dict[str, Any]], where: str, gpu: bool) -> Plan:
    """The plan of a kind of machine; the finals on a GPU may have settings that a CPU has chosen.

    Args:
        recorded: all records.
        where: the kind of machine, as :func:`by_machine` has it.
        gpu: whether it is a GPU.
    """
    every = by_machine(recorded)
    plan = Plan(every.get(where, {}))
    if not gpu or set(FINALS) <= set(plan.chosen):
        return plan
    for others in every.values():
        tuned = {
            name: one
            for name, one in others.items()
            if one["seed"] == TUNING_SEED and one["device"] == "cpu"
        }
        if set(FINALS) <= set(Plan(tuned).chosen):
            return Plan({**plan.records, **tuned})
    return plan


def plans(recorded: Sequence[Dict[str, Any]]) -> Dict[str, Plan]:
    """The plan of each kind of machine that has a record."""
    return {
        where: plan_of(recorded, where, any(one["device"] == "cuda" for one in own.values()))
        for where, own in by_machine(recorded).items()
    }


def plan_here(arguments: argparse.Namespace) -> Plan:
    """The plan of the machine that this runs on."""
    here = machine(flat({"device": device_of(arguments), "versions": versions()}))
    return plan_of(records(), str(here), arguments.gpu)


def compared() -> Dict[Tuple[str, str, str], Difference]:
    """Every comparison that has all its seeds, by the kind of machine and its two arms.

    P is adjusted among the primary comparisons, and among the others.
    """
    return {
        (where, *pair): one
        for where, plan in plans(records()).items()
        for pairs in (multi30k_plan.PRIMARY, multi30k_plan.SECONDARY)
        for pair, one in plan.comparisons(pairs).items()
        if not math.isnan(one.test.p)
    }


def train(arguments: argparse.Namespace) -> str:
    """Run one training that is due, record it, and return its scores as a line."""
    check_installation(modules=("sacremoses", "sacrebleu"))
    plan = plan_here(arguments)
    due = {one.name: one for one in plan.due()}
    if arguments.what in plan.records:
        return f"{arguments.what} is recorded in {RECORDS}\n"
    if arguments.what not in due:
        raise ConfigurationError(
            "a training that is due",
            arguments.what,
            "`python -m studies.multi30k due` names them.",
        )
    run = Multi30kRun(due[arguments.what], arguments)

    def jobs(*some: Job, **options: Any) -> None:
        options = {"threads": arguments.threads, "gpu": arguments.gpu, **options}
        at_once = len(some) if arguments.gpu else 1
        run_jobs(some, at_once=at_once, lock_fd=run.work.lock.fileno(), **options)

    with run.work.locked():
        run.keep_flags()
        if not run.is_trained():
            jobs(run.training(), on_end=lambda _, usage: run.training_ended(usage))
        jobs(run.average())
        jobs(run.analysis())
        jobs(*(run.translation(subset) for subset, _, _ in (VALIDATION, *TEST_SETS)))
        record = run.record()
    add_records(RECORDS, [record])
    scores = " / ".join(f"{one['bleu']:.2f}" for one in record["tests"].values())
    return f"{run.name}: BLEU {scores}, validation {record['valid_bleu']:.2f}\n"


def part(name: str) -> str:
    """A generated part of the page."""
    recorded = records()
    earlier = [one for one in recorded if "device" not in one]
    if name == "before":
        return multi30k_plan.arms_table(earlier)
    if name == "penalty":
        return multi30k_plan.penalty_sentence(earlier)
    if name == "trainings":
        arms = {
            where: multi30k_plan.arms_table(list(own.values()))
            for where, own in by_machine(recorded).items()
        }
        return _under_machines(arms) or "None is recorded yet.\n"
    of = multi30k_plan.plan_table if name == "plan" else multi30k_plan.comparison_table
    texts = {where: of(plan) for where, plan in plans(recorded).items()}
    return _under_machines(texts) or of(Plan({}))


def _under_machines(texts: Dict[str, str]) -> str:
    return "\n".join(f"On {where}:\n\n{text}" for where, text in texts.items())


def write_page() -> str:
    """Write the generated parts of the page."""
    write_text(PAGE, with_generated(PAGE.read_text("utf-8"), part))
    return f"{PAGE.name} written\n"


def due_text(plan: Plan) -> str:
    """The names of the trainings that can be started, one a line."""
    return "".join(f"{one.name}\n" for one in plan.due())


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; returns the exit status."""
    arguments = parse_arguments(argv)

    def action() -> str:
        if arguments.what == "due":
            return due_text(plan_here(arguments))
        if arguments.what == "report":
            return write_page()
        return train(arguments)

    return exit_status(action, arguments.work_dir)


if __name__ == "__main__":
    sys.exit(main())
