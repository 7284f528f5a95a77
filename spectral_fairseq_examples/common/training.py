"""A training that is done once, however often it is interrupted, and the measures of its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Sequence

from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.errors import CheckpointError, ConfigurationError
from spectral_fairseq_examples.common.fairseq_log import TrainingProgress, read_training_log
from spectral_fairseq_examples.common.jobs import Job, Usage, no_progress
from spectral_fairseq_examples.common.measures import analyze_command, table_figures
from spectral_fairseq_examples.common.workdir import WorkDir, write_json
from spectral_fairseq_examples.common.workers import Workers


class TrainingRun:
    """One training with one recipe, in a folder of its own.

    Args:
        label: the text beside its bar.
        work: the work folder, which keeps the stamps.
        folder: a folder below it; receives ``train.log``, ``checkpoints/``, ``memory.json`` and
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
            self.folder / "train.log",
            self.updates,
            " updates",
            TrainingProgress(),
        )

    def training_ended(self, usage: Usage) -> None:
        """Record the peak memory over all interruptions, and that a training is complete."""
        peak = max(self.peak_bytes(), usage.peak_bytes)
        write_json(self.folder / "memory.json", {"peak_bytes": peak})
        if usage.exit_status == 0:
            self.work.mark_done(self.stamp, {})

    def peak_bytes(self) -> int:
        """Peak resident memory recorded so far; 0 if none was, for a training that ended unseen."""
        path = self.folder / "memory.json"
        return int(json.loads(path.read_text("utf-8"))["peak_bytes"]) if path.exists() else 0

    def peak_figure(self) -> Dict[str, int]:
        """``peak_bytes``, if known."""
        peak = self.peak_bytes()
        return {"peak_bytes": peak} if peak else {}

    def analysis(self) -> Job:
        """The job that measures the table of the best checkpoint."""
        command = analyze_command(self.best, self.binary)
        return Job(self.label, command, self.folder / "analyze.log", 1, " analysis", no_progress)

    def training_figures(self) -> Dict[str, Any]:
        """Figures of the training."""
        log = read_training_log(self.folder / "train.log", self.best_metric)
        return {**log, **self.peak_figure()}

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
