"""A training that is done once, however often it is interrupted, and the measures of its table."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, List, Sequence

import torch

import spectral_fairseq
from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.errors import CheckpointError, ConfigurationError
from spectral_fairseq.functional.float32_products import processor
from studies.running import Job, Usage, json_document, no_progress
from studies.training_log import TrainingProgress, read_training_log, starts
from studies.work_folder import WorkDir, write_json
from studies.workers import Workers

PACKAGES = ("torch", "fairseq", "ve-fairseq", "numpy", "sentencepiece", "sacrebleu", "matplotlib")


def analyze_command(checkpoint: Path, binary: Path) -> List[str]:
    """``spectral-fairseq analyze`` on a checkpoint, printing JSON.

    Args:
        checkpoint: of any recipe.
        binary: fairseq's data folder, with the dictionaries.
    """
    command = ["spectral-fairseq", "analyze", str(checkpoint), "--dict", str(binary)]
    return [*command, "--format", "json", "--no-progress"]


def table_figures(log: Path) -> Dict[str, Any]:
    """Measures of the table of word vectors, from the output of :func:`analyze_command`.

    They are taken over all words; padding and fairseq's filler symbols are left out.
    """
    (found,) = json_document(log)["checkpoints"]
    measures = found["measures"]
    figures: Dict[str, Any] = {
        "words": found["table"]["words"],
        "dimensions": found["table"]["dimensions"],
        "mean_cosine": measures["mean_cosine"],
        "sigma_last_to_first": measures["sigma_min"] / measures["sigma_max"],
        "effective_rank": measures["effective_rank"],
        "singular_values": [round(value, 6) for value in found["singular_values"]],
        "isotropy_as_is": {
            "I1_both_signs": measures["i1"],
            "I2_both_signs": measures["i2"],
        },
    }
    if found.get("prior"):
        figures["prior"] = [round(value, 6) for value in found["prior"]]
    return figures


def scores(hypotheses: List[str], references: List[str]) -> Dict[str, Any]:
    """SacreBLEU and chrF, each with its signature."""
    from sacrebleu.metrics import BLEU, CHRF

    result: Dict[str, Any] = {}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        score = metric.corpus_score(hypotheses, [references])
        result[name] = round(score.score, 2)
        result[f"{name}_signature"] = f"{score.name}|{metric.get_signature()}"
    return result


def versions() -> Dict[str, str]:
    """Versions of everything that could change a figure."""
    found = {
        "spectral_fairseq": spectral_fairseq.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor().name,
        "cpu_cores": str(os.cpu_count()),
    }
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    return found


class TrainingRun:
    """One training with one recipe, in a folder of its own.

    Args:
        label: the text beside its bar.
        work: the work folder, which keeps the stamps.
        folder: a folder below it; receives ``train.log``, ``checkpoints/``, ``usage.json`` and
            ``analyze.log``.
        command: ``fairseq-train`` and its arguments, saving into ``checkpoints/``.
        binary: fairseq's data folder.
        updates: the number of updates that it will make, for the bar.
        max_update: the update after which ``command`` ends; 0 where epochs decide.
        flags: the part of ``command`` that makes the recipe.
    """

    best_metric = "loss"  # fairseq's default of --best-checkpoint-metric

    def __init__(
        self,
        label: str,
        work: WorkDir,
        folder: Path,
        command: List[str],
        binary: Path,
        updates: int,
        max_update: int,
        flags: Sequence[str],
    ) -> None:
        self.label, self.work, self.folder, self.binary = label, work, folder, binary
        self.train_command, self.updates, self.max_update = command, updates, max_update
        self.flags = list(flags)
        self.best = folder / "checkpoints" / "checkpoint_best.pt"
        self.stamp = "train_" + "_".join(folder.relative_to(work.root).parts)
        self.log, self._usage_file = folder / "train.log", folder / "usage.json"

    def is_trained(self) -> bool:
        """Whether training came to its end.

        It must not be started again then, because fairseq would make one more update.
        """
        return self.work.is_done(self.stamp) or self._ended_unseen()

    def _ended_unseen(self) -> bool:
        """Whether the last checkpoint is that of the last update.

        A training that outlives the run that started it ends without a stamp.
        """
        path = self.folder / "checkpoints" / "checkpoint_last.pt"
        if not self.max_update or not path.exists():
            return False
        try:
            history = load_checkpoint(path).get("optimizer_history") or ()
        except CheckpointError:  # fairseq will report it
            return False
        return max((one["num_updates"] for one in history), default=0) >= self.max_update

    def keep_flags(self) -> None:
        """Record the recipe's flags, or compare them with the recorded ones.

        Flags are written in a source file, which may have changed since the training began.

        Raises:
            ConfigurationError: they differ.
        """
        path = self.folder / "flags.json"
        if path.exists():
            before = json.loads(path.read_text("utf-8"))
            if before != self.flags:
                raise ConfigurationError(
                    f"the flags with which {self.folder} was begun: {' '.join(before)}",
                    " ".join(self.flags),
                    "Give another --work-dir, or the script as it was.",
                )
        elif not self.is_trained():  # older versions recorded no flags
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(path, self.flags)

    def training(self) -> Job:
        """The job that trains or continues training."""
        return Job(
            self.label,
            self.train_command,
            self.log,
            self.updates,
            " updates",
            TrainingProgress(),
        )

    def training_ended(self, usage: Usage) -> None:
        """Record memory and processor time over all interruptions, and the end of a training."""
        before, started = self._usage(), starts(self.log_text())
        unseen = started - before.get("starts", 1 if before else 0) > 1
        peak = max(before.get("peak_bytes", 0), usage.peak_bytes)
        seconds = before.get("processor_seconds", 0.0) + usage.processor_seconds
        figures = {"peak_bytes": peak, "processor_seconds": round(seconds, 1)}
        whole = before.get("whole", True) and not unseen
        write_json(self._usage_file, {**figures, "starts": started, "whole": whole})
        if usage.exit_status == 0:
            self.work.mark_done(self.stamp, {})

    def usage_figures(self) -> Dict[str, Any]:
        """Peak memory and processor time so far; empty if a part of the training ended unseen."""
        figures = self._usage()
        # The log tells of each start, and what a killed run had begun was not measured.
        seen, whole = figures.pop("starts", 1), figures.pop("whole", True)
        return figures if whole and starts(self.log_text()) <= seen else {}

    def _usage(self) -> Dict[str, Any]:
        path = self._usage_file
        return json.loads(path.read_text("utf-8")) if path.exists() else {}

    def log_text(self) -> str:
        """What fairseq-train has written; empty before it began."""
        return self.log.read_text("utf-8", "replace") if self.log.exists() else ""

    def analysis(self) -> Job:
        """The job that measures the table of the best checkpoint."""
        command = analyze_command(self.best, self.binary)
        return Job(self.label, command, self.folder / "analyze.log", 1, " analysis", no_progress)

    def training_figures(self) -> Dict[str, Any]:
        """Figures of the training."""
        log = read_training_log(self.log, self.best_metric)
        return {**log, **self.usage_figures()}

    def figures(self) -> Dict[str, Any]:
        """Figures of the training and, after :meth:`analysis`, of the table."""
        return {**self.training_figures(), **table_figures(self.folder / "analyze.log")}


def train_all(runs: Sequence[TrainingRun], workers: Workers) -> None:
    """Train all runs that are not trained yet.

    Raises:
        ConfigurationError: a run was begun with other flags.
    """
    for run in runs:
        run.keep_flags()
    due = {run.label: run for run in runs if not run.is_trained()}
    workers.run(
        [run.training() for run in due.values()],
        on_end=lambda job, usage: due[job.label].training_ended(usage),
    )
