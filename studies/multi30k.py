"""One training of the study of Multi30k, its translations and its scores: studies/multi30k.md.

    python -m studies.multi30k plain --data data-bin/multi30k.en-de --text TEXT --raw RAW
    python -m studies.multi30k wn_init --seed 1100000 --flags="--weight-decay 0.1" ...

``--data`` is what the commands of examples/translation_multi30k_en_de make, ``--text`` the folder
of the subwords that they read, and ``--raw`` holds the test sets as they were written
(``test_2016_flickr.de`` and so on; without it the scores on raw text are left out). After an
interruption give the same command: a training goes on from its checkpoint, and what is recorded in
``studies/multi30k.jsonl`` is not done again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from filelock import UnixFileLock

from benchmarks.harness import commit
from spectral_fairseq.files import replacing
from studies.corpus import split_lines
from studies.running import Job, WorkDir, check_installation, exit_status, no_progress, run_jobs
from studies.training import TrainingRun, versions
from studies.training_data import ROOT
from studies.translation import USER_DIR, TranslationProgress, read_translations

RECORDS = ROOT / "studies" / "multi30k.jsonl"
_SIDE = "--{0}-layers 4 --{0}-embed-dim 128 --{0}-ffn-embed-dim 256 --{0}-attention-heads 4"
RECIPE = (
    f"--task translation --share-all-embeddings {_SIDE.format('encoder')} {_SIDE.format('decoder')}"
    " --label-smoothing 0.1 --dropout 0.3 --fast-dropout --optimizer adam --adam-betas (0.9,0.98)"
    " --lr 0.005 --num-workers 0"
)
# A GPU waits for its kernels to be launched, so it takes the tokens of an update at once.
BATCHES = {"cpu": "--max-tokens 4096 --update-freq 2", "gpu": "--max-tokens 8192"}
TO_ZERO = (
    "--lr-scheduler polynomial_decay --warmup-updates 500 --end-learning-rate 0 --power 1"
    " --total-num-update {0} --max-update {0} --validate-interval 2 --keep-last-epochs 5"
)
PUBLISHED_SCHEDULE = (
    "--lr-scheduler inverse_sqrt --warmup-updates 2000 --warmup-init-lr 1e-7 --max-update 8000"
    " --patience 10 --keep-last-epochs 10"
)
PLAIN = "--arch transformer --criterion regularized_cross_entropy"
ARMS: Dict[str, str] = {
    "plain": PLAIN,
    "rdrop": f"{PLAIN} --rdrop-weight 5",
    "wn_init": f"{PLAIN} --arch transformer_wn --weight-norm-init-sigma 0.07",
    "wn_init_rdrop": f"{PLAIN} --arch transformer_wn --weight-norm-init-sigma 0.07"
    " --rdrop-weight 5",
    "wn_reg": "--arch transformer --criterion weight_norm --weight-norm-target 1",
    "control": "--arch transformer_sc --criterion spectrum_control",
    "control_paper": "--arch transformer_sc --criterion spectrum_control --svd-interval 0",
    "cosine": "--arch transformer --criterion mle_cosreg",
}
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
    add("arm", choices=sorted(ARMS), metavar="ARM", help=", ".join(sorted(ARMS)))
    add("--data", type=Path, required=True, metavar="DIR", help="binarised data")
    add("--text", type=Path, required=True, metavar="DIR", help="subwords: test.2016.de and so on")
    add("--raw", type=Path, metavar="DIR", help="the test sets as they were written")
    add("--seed", type=int, default=1, metavar="N", help="default: %(default)s, for tuning")
    add("--updates", type=int, default=2500, metavar="N", help="0: the published schedule")
    add("--flags", default="", metavar="FLAGS", help="added to those of the arm")
    add("--float32", action="store_true", help="instead of bfloat16")
    add("--threads", type=int, default=1, metavar="N", help="default: %(default)s")
    add("--work-dir", type=Path, default=Path("outputs/multi30k"), metavar="DIR")
    add("--cpu", action="store_true", help="leave the GPU alone")
    return parser.parse_args(argv)


class Multi30kRun(TrainingRun):
    """A training, the mean of its last checkpoints, and what that translates.

    Args:
        arguments: of the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        schedule = TO_ZERO.format(arguments.updates) if arguments.updates else PUBLISHED_SCHEDULE
        device = "cpu" if arguments.cpu else "gpu"
        flags = shlex.split(
            f"{RECIPE} {BATCHES[device]} {schedule} {ARMS[arguments.arm]} {arguments.flags}"
            f" --seed {arguments.seed}" + ("" if arguments.float32 else " --bf16")
        )
        changed = "".join(char if char.isalnum() else "-" for char in arguments.flags.strip("- "))
        precision = "float32" if arguments.float32 else ""
        parts = (
            *(arguments.arm, precision, changed, str(arguments.updates), str(arguments.seed)),
            "" if arguments.cpu else "gpu",
        )
        self.name = "_".join(filter(None, parts))
        work = WorkDir(arguments.work_dir.resolve() / self.name)
        folder = work.root
        command = ["fairseq-train", str(arguments.data), "--user-dir", USER_DIR, *flags]
        command += ["--save-dir", str(folder / "checkpoints")]
        command += ["--log-format", "json", "--log-interval", "62"]
        self.device = ["--cpu"] if arguments.cpu else []
        updates = arguments.updates or 8000
        super().__init__(
            *(self.name, work, folder, command + self.device),
            *(arguments.data, updates, arguments.updates, flags),
        )
        self.best, self.arguments = folder / "average.pt", arguments
        self.checkpoints = 5 if arguments.updates else 10

    def average(self) -> Job:
        """The job that averages the last checkpoints."""
        command = ["spectral-fairseq", "average", str(self.folder / "checkpoints"), "--overwrite"]
        command += ["--num-epoch-checkpoints", str(self.checkpoints), "--output", str(self.best)]
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
            "arm": self.arguments.arm,
            "seed": self.arguments.seed,
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
    if not RECORDS.exists():
        return []
    return [json.loads(line) for line in split_lines(RECORDS.read_bytes())]


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; returns the exit status."""
    arguments = parse_arguments(argv)
    run = Multi30kRun(arguments)

    def jobs(*some: Job, **options: Any) -> None:
        options = {"threads": arguments.threads, "gpu": not arguments.cpu, **options}
        at_once = 1 if arguments.cpu else len(some)
        run_jobs(some, at_once=at_once, lock_fd=run.work.lock.fileno(), **options)

    def action() -> str:
        check_installation(modules=("sacremoses", "sacrebleu"))
        done = records()
        if run.name in {one["name"] for one in done}:
            return f"{run.name} is recorded in {RECORDS}\n"
        with run.work.locked():
            run.keep_flags()
            if not run.is_trained():
                jobs(run.training(), on_end=lambda _, usage: run.training_ended(usage))
            jobs(run.average())
            jobs(run.analysis())
            jobs(*(run.translation(subset) for subset, _, _ in (VALIDATION, *TEST_SETS)))
            record = run.record()
        with UnixFileLock(RECORDS.with_suffix(".lock")), replacing(RECORDS) as partial:
            lines = [json.dumps(one, ensure_ascii=False) for one in (*records(), record)]
            partial.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        tests = record["tests"].values()
        scores = " / ".join(f"{one['bleu']:.2f}" for one in tests)
        return f"{run.name}: BLEU {scores}, validation {record['valid_bleu']:.2f}\n"

    return exit_status(action, run.folder)


if __name__ == "__main__":
    sys.exit(main())
