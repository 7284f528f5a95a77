"""The first epochs of a mixture of softmaxes on Penn Treebank: examples/lm_ptb/README.md.

    python -m studies.penn_treebank mos_28 --data data-bin/penn
    python -m studies.penn_treebank report

A name is that of an arm and a seed: mos or mos_weight_norm_init; 28, 1028 or 2028. ``--data`` is
what the page's command makes. A training goes to epoch ``--epochs`` (1); asked for more, it goes on
from there, and after an interruption from the end of its last epoch. Each epoch is a record with
its perplexity on validation, and the last one has that on the test set too. ``report`` writes the
tables of the page.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from benchmarks.harness import commit, positive
from studies.json_lines import add_records, read_records
from studies.machine import check_installation
from studies.pages import with_generated
from studies.running import Job, exit_status, json_document, no_progress, run_jobs
from studies.tables import flat, machine
from studies.text_tables import text_table
from studies.training import TrainingRun, versions
from studies.training_data import ROOT
from studies.training_log import log_records
from studies.translation import USER_DIR
from studies.work_folder import WorkDir, write_text

RECORDS = ROOT / "studies" / "penn_treebank.jsonl"
PAGE = ROOT / "examples" / "lm_ptb" / "README.md"
RECIPE = (
    "--task stateful_language_modeling --batch-size 12 --tokens-per-sample 70 --variable-bptt"
    " --optimizer nt_asgd --lr-scheduler nt_asgd --nt-asgd-interval 5"
    " --lr 20 --weight-decay 1.2e-6 --clip-norm 0.25"
)
_MIXTURE = "--arch awd_lstm_mos_ptb --criterion regularized_cross_entropy"
ARMS = {"mos": _MIXTURE, "mos_weight_norm_init": f"{_MIXTURE} --embedding-type weight-norm"}
SEEDS = (28, 1028, 2028)
NAMES = {f"{arm}_{seed}": (arm, seed) for seed in SEEDS for arm in ARMS}
UPDATES_PER_EPOCH = 1145
# Herold et al., 2018, Table 2: epoch -> perplexity of either arm.
REPORTED: Dict[int, Tuple[float, float]] = {
    1: (180.72, 162.18),
    10: (92.09, 85.92),
    20: (78.94, 73.36),
    30: (73.06, 71.44),
    40: (70.20, 69.27),
}


def parse_arguments(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.penn_treebank",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", metavar="WHAT", choices=("report", *NAMES), help="report, or a training's name")
    add("--data", type=Path, metavar="DIR", help="binarised data")
    add("--epochs", type=positive, default=1, metavar="N", help="default: %(default)s")
    add("--threads", type=positive, default=1, metavar="N", help="default: %(default)s")
    add("--work-dir", type=Path, default=Path("outputs/penn_treebank"), metavar="DIR")
    add("--gpu", action="store_true", help="train on a GPU")
    arguments = parser.parse_args(argv)
    if arguments.what != "report" and not arguments.data:
        parser.error("expected --data with the name of a training; found none")
    return arguments


class PennRun(TrainingRun):
    """A training to an epoch, and the perplexity of what it ends with.

    Args:
        name: of :data:`NAMES`.
        arguments: of the command line.
    """

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name, self.epochs = name, arguments.epochs
        self.arm, self.seed = NAMES[name]
        flags = [*shlex.split(f"{RECIPE} {ARMS[self.arm]}"), "--seed", str(self.seed)]
        work = WorkDir(arguments.work_dir.resolve() / name)
        self.kind = "cuda" if arguments.gpu else "cpu"
        self.device = [] if arguments.gpu else ["--cpu"]
        command = ["fairseq-train", str(arguments.data), "--user-dir", USER_DIR, *flags]
        command += ["--save-dir", str(work.root / "checkpoints"), "--no-epoch-checkpoints"]
        command += ["--log-format", "json", "--log-interval", "20", "--max-epoch", str(self.epochs)]
        updates = UPDATES_PER_EPOCH * self.epochs
        common = (name, work, work.root, command + self.device)
        super().__init__(*common, arguments.data, updates, 0, flags)
        self.stamp = f"train_{self.epochs}"
        self.test_log = work.root / f"test_{self.epochs}.log"

    def evaluation(self) -> Job:
        """The job that reads the test set with the last checkpoint, each token once."""
        last = self.folder / "checkpoints" / "checkpoint_last.pt"
        command = ["spectral-fairseq", "evaluate-lm", str(last), str(self.binary)]
        command += ["--gen-subset", "test", "--format", "json", *self.device]
        return Job(self.label, command, self.test_log, 1, " evaluation", no_progress)

    def records(self, known: Sequence[int]) -> List[Dict[str, Any]]:
        """A record of each epoch that has none.

        Args:
            known: the epochs that have one.
        """
        # An interrupted epoch may have been validated twice; the latest is the one that goes on.
        validated = {
            int(figures["epoch"]): figures
            for kind, figures in log_records(self.log)
            if kind == "valid"
        }
        found = []
        for epoch, figures in validated.items():
            if epoch in known:
                continue
            one = {
                "name": self.name,
                "arm": self.arm,
                "seed": self.seed,
                "epoch": epoch,
                "device": self.kind,
                "flags": " ".join(self.flags),
                "valid_ppl": round(2 ** float(figures["valid_nll_loss"]), 3),
                "versions": {**versions(), "commit": commit()},
            }
            if epoch == self.epochs:
                (figure,) = json_document(self.test_log)["figures"]
                one["test_ppl"] = round(figure["perplexity"], 3)
                one.update(self.usage_figures())
            found.append(one)
        return found


def records() -> List[Dict[str, Any]]:
    """What has been recorded."""
    return read_records(RECORDS)


def train(arguments: argparse.Namespace) -> str:
    """Train to an epoch, record what is new, and return it as lines."""
    check_installation(("fairseq-train", "spectral-fairseq"), ())
    run = PennRun(arguments.what, arguments)
    # On another kind of machine it is another training.
    here = machine(flat({"device": run.kind, "versions": versions()}))
    own = [one for one in records() if one["name"] == run.name and machine(flat(one)) == here]
    known = [one["epoch"] for one in own]
    if run.epochs in known:
        return f"{run.name} is recorded to epoch {run.epochs} in {RECORDS}\n"

    def job(one: Job, **options: Any) -> None:
        options = {"threads": arguments.threads, "gpu": arguments.gpu, **options}
        run_jobs([one], at_once=1, lock_fd=run.work.lock.fileno(), **options)

    with run.work.locked():
        run.keep_flags()
        if not run.is_trained():
            job(run.training(), on_end=lambda _, usage: run.training_ended(usage))
        job(run.evaluation())
        new = run.records(known)
    add_records(RECORDS, new)
    return "".join(
        f"{run.name}: epoch {one['epoch']}, validation perplexity {one['valid_ppl']:.2f}\n"
        for one in new
    )


def epochs_table(recorded: Sequence[Dict[str, Any]]) -> str:
    """Table 2 of the paper beside what was measured, on validation: the mean over seeds.

    Each kind of machine has rows of its own. Where both arms have the same seeds there, the last
    column is by how much less the perplexity of the initialisation is.
    """
    measured: Dict[Tuple[int, str], Dict[str, Dict[int, float]]] = {}
    for one in recorded:
        place = (one["epoch"], machine(flat(one)) or "")
        arms = measured.setdefault(place, {arm: {} for arm in ARMS})
        arms[one["arm"]][one["seed"]] = one["valid_ppl"]
    for epoch in set(REPORTED) - {epoch for epoch, _ in measured}:
        measured[epoch, ""] = {arm: {} for arm in ARMS}
    rows = []
    for (epoch, where), arms in sorted(measured.items()):
        reported = REPORTED.get(epoch, ())
        plain, initialised = arms.values()
        both = plain and set(plain) == set(initialised)
        means = [statistics.fmean(of.values()) for of in arms.values()] if both else []
        rows.append(
            [
                str(epoch),
                *([f"{one:.2f}" for one in reported] or ["", ""]),
                _less(*reported) if reported else "",
                *(_mean(of) for of in arms.values()),
                _less(*means) if means else "",
                where,
            ]
        )
    heads = ["epoch"]
    for kind in ("reported", "measured"):
        heads += [f"`mos`, {kind}", f"with the initialisation, {kind}", "less"]
    return text_table(rows, [*heads, "machine"], "pipe") + "\n"


def _mean(of: Dict[int, float]) -> str:
    if not of:
        return ""
    seeds = f"{len(of)} seeds" if len(of) > 1 else "one seed"
    return f"{statistics.fmean(of.values()):.2f} ({seeds})"


def _less(plain: float, initialised: float) -> str:
    return f"{100 * (1 - initialised / plain):.1f} %"


def trainings_table(recorded: Sequence[Dict[str, Any]]) -> str:
    """What every training had at the epochs to which it was trained."""
    rows = [
        [
            f"`{one['name']}`",
            str(one["epoch"]),
            f"{one['valid_ppl']:.2f}",
            f"{one['test_ppl']:.2f}",
            f"{one['processor_seconds'] / 3600:.1f}" if "processor_seconds" in one else "",
            machine(flat(one)) or "",
        ]
        for one in recorded
        if "test_ppl" in one
    ]
    if not rows:
        return "None is recorded yet.\n"
    heads = ["training", "epoch", "validation", "test", "hours of a processor", "machine"]
    return text_table(rows, heads, "pipe") + "\n"


def part(name: str) -> str:
    """A generated part of the page."""
    return {"epochs": epochs_table, "trainings": trainings_table}[name](records())


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; returns the exit status."""
    arguments = parse_arguments(argv)

    def action() -> str:
        if arguments.what != "report":
            return train(arguments)
        write_text(PAGE, with_generated(PAGE.read_text("utf-8"), part))
        return f"{PAGE.parent.name}/{PAGE.name} written\n"

    return exit_status(action, arguments.work_dir)


if __name__ == "__main__":
    sys.exit(main())
