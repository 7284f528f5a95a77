"""A training of a study as fairseq's commands, resumed where it was interrupted."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import List

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary

from spectral_fairseq.functional.word_counts import smoothed_log_counts
from spectral_fairseq.plugin.counts import training_counts
from studies.evidence.corpora import EvaluationSet
from studies.evidence.grid import Study
from studies.evidence.plan import Cell
from studies.running import Job
from studies.training import TrainingRun
from studies.training_log import log_records
from studies.translation import USER_DIR, TranslationProgress, read_translations
from studies.work_folder import WorkDir, write_text

_GENERATE = (
    "--source-lang de --target-lang en --beam 5 --batch-size 32 --remove-bpe sentencepiece "
    "--num-workers 0 --distributed-world-size 1"
)


def flags_of(study: Study, cell: Cell) -> List[str]:
    """All flags that determine a result; a flag of the method overrides the recipe's."""
    recipe = [part for flag, value in cell.recipe for part in (f"--{flag}", value)]
    if study.corpus == "translation":
        at = recipe.index("--subwords")
        del recipe[at : at + 2]  # it chooses the data
    return [*shlex.split(study.flags), *recipe, *shlex.split(cell.flags), "--seed", str(cell.seed)]


def train_command(
    study: Study, cell: Cell, binary: Path, checkpoints: Path, device: str
) -> List[str]:
    """``fairseq-train`` for one training."""
    command = ["fairseq-train", str(binary), "--user-dir", USER_DIR, *flags_of(study, cell)]
    command += ["--save-dir", str(checkpoints)]
    return command + (["--cpu"] if device == "cpu" else [])


_START = re.compile(r"\{(start|lengths):(.+)\}")


def with_start(command: List[str], cell: Cell, binary: Path, folder: Path) -> List[str]:
    """The command with a file of initial vectors, drawn anew for each seed, in its place.

    Args:
        command: may hold ``{start:SCALE}``, for fairseq's own initial table times that number, or
            ``{lengths:SIGMA}``, for vectors of the length that a weight-norm table starts with.
        cell: the training.
        binary: fairseq's data folder.
        folder: receives ``start.vec``.
    """
    found = [match.groups() for match in map(_START.fullmatch, command) if match]
    if not found:
        return command
    path, dim = folder / "start.vec", int(command[command.index("--encoder-embed-dim") + 1])
    if not path.exists():
        words = Dictionary.load(str(binary / "dict.en.txt"))
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(cell.seed)
            rows = torch.randn(len(words), dim) * dim**-0.5
        kind, number = found[0]
        if kind == "lengths":
            rows = F.normalize(rows) * smoothed_log_counts(_counts(words, binary))[:, None]
        rows *= float(number)
        rows[words.pad()] = 0
        text = [f"{len(words)} {dim}"]
        for word, row in zip(words.symbols, rows.tolist()):
            text.append(" ".join([word, *(f"{value:.6f}" for value in row)]))
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(f"{line}\n" for line in text))
    return [str(path) if _START.fullmatch(part) else part for part in command]


def _counts(words: Dictionary, binary: Path) -> List[float]:
    """How often each word occurs in the training data of both languages, as weight norm counts."""
    data = Namespace(data=str(binary), source_lang="de", target_lang="en")
    task = SimpleNamespace(args=data, source_dictionary=words, target_dictionary=words)
    return training_counts(task, words)


class StudyRun(TrainingRun):
    """One training and its translations, in a folder of its own.

    Args:
        study: the study.
        cell: the training.
        work: the work folder.
        binary: fairseq's data folder.
        device: ``cpu`` or ``cuda``.
    """

    best_metric = "nll_loss"

    def __init__(self, study: Study, cell: Cell, work: WorkDir, binary: Path, device: str) -> None:
        folder, flags = work.root / "runs" / cell.name, flags_of(study, cell)
        command = train_command(study, cell, binary, folder / "checkpoints", device)
        command = with_start(command, cell, binary, folder)
        guess = study.guessed_updates
        super().__init__(cell.name, work, folder, command, binary, guess, 0, flags)
        self.cell, self.device = cell, device
        self.nbest = len(study.length_penalties) > 1

    def _ended_unseen(self) -> bool:
        """Whether fairseq came to its end, though the run that had started it did not see it."""
        return "| done training in " in self.log_text()

    def diverged(self) -> bool:
        """Whether training ended because the loss or its gradient was infinite or NaN."""
        return "\nFloatingPointError" in self.log_text()

    def times_resumed(self) -> int:
        """How often training was resumed from a checkpoint."""
        return self.log_text().count("| Loaded checkpoint ")

    def curve(self) -> List[List[float]]:
        """Validation loss in bits: pairs of the number of updates and the loss."""
        points = {
            int(record["valid_num_updates"]): float(record["valid_nll_loss"])
            for kind, record in log_records(self.log)
            if kind == "valid"
        }
        return [[update, points[update]] for update in sorted(points)]

    def translation_of(self, text: EvaluationSet) -> Job:
        """The job that translates a text with the best checkpoint."""
        log = self._translations(text)
        if log.exists():
            log.unlink()  # left by an interrupted run
        command = ["fairseq-generate", str(text.binary), "--user-dir", USER_DIR]
        command += ["--path", str(self.best), "--gen-subset", text.split, *shlex.split(_GENERATE)]
        command += ["--nbest", "5"] if self.nbest else []
        command += ["--cpu"] if self.device == "cpu" else []
        segments = len(text.lines("en"))
        return Job(self.label, command, log, segments, " sentences", TranslationProgress())

    def hypotheses(self, text: EvaluationSet, length_penalty: float = 1.0) -> List[str]:
        """Translations of a text, in its order."""
        return read_translations(self._translations(text), len(text.lines("en")), length_penalty)

    def _translations(self, text: EvaluationSet) -> Path:
        return self.folder / f"translate-{text.name}.log"
