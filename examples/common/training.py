"""A training that is done once, however often it is interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Dict, List, Sequence

from fairseq_log import TrainingProgress
from jobs import Job, Usage
from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.errors import CheckpointError, ConfigurationError
from workdir import WorkDir, write_json
from workers import Workers


class TrainingRun:
    """One training with one recipe, in a folder of its own.

    Args:
        label: shown beside its bar.
        work: the work folder, which keeps the stamps.
        folder: below it; receives ``train.log``, ``checkpoints/`` and ``memory.json``.
        command: ``fairseq-train`` and its arguments, saving into ``checkpoints/``.
        updates: how many it will make, for the bar.
        max_update: the one after which ``command`` ends; 0 where epochs decide.
        flags: those of ``command`` that make the recipe.
    """

    def __init__(
        self,
        label: str,
        work: WorkDir,
        folder: Path,
        command: List[str],
        updates: int,
        max_update: int,
        flags: Sequence[str],
    ) -> None:
        self.label, self.work, self.folder = label, work, folder
        self.train_command, self.updates, self.max_update = command, updates, max_update
        self.flags = list(flags)
        self.best = folder / "checkpoints" / "checkpoint_best.pt"
        self.stamp = "train_" + "_".join(folder.relative_to(work.root).parts)

    def is_trained(self) -> bool:
        """Whether training came to its end. It must not be started again then.

        fairseq would make one more update.
        """
        return self.work.is_done(self.stamp) or self._ended_unseen()

    def _ended_unseen(self) -> bool:
        """Whether the last checkpoint, which fairseq writes last, is that of the last update.

        So it is without a stamp where a training outlived the run that had started it.
        """
        path = self.folder / "checkpoints" / "checkpoint_last.pt"
        if not self.max_update or not path.exists():
            return False
        try:
            history = load_checkpoint(path).get("optimizer_history") or ()
        except CheckpointError:  # fairseq will say so
            return False
        return max((one["num_updates"] for one in history), default=0) >= self.max_update

    def keep_flags(self) -> None:
        """Record the recipe's flags, or compare them with those the training was begun with.

        They stand in a script, which its user may change and another version may have changed.

        Raises:
            ConfigurationError: they are others.
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
        elif not self.is_trained():  # which in older folders has none
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(path, self.flags)

    def training(self) -> Job:
        """The job that trains, or goes on training."""
        return Job(
            self.label,
            self.train_command,
            self.folder / "train.log",
            self.updates,
            " updates",
            TrainingProgress(),
        )

    def training_ended(self, usage: Usage) -> None:
        """Note the peak memory over all interruptions, and a training that is complete."""
        peak = max(self.peak_bytes(), usage.peak_bytes)
        write_json(self.folder / "memory.json", {"peak_bytes": peak})
        if usage.exit_status == 0:
            self.work.mark_done(self.stamp, {})

    def peak_bytes(self) -> int:
        """Peak resident memory noted so far; 0 if none, as of a training that ended unseen."""
        path = self.folder / "memory.json"
        return int(json.loads(path.read_text("utf-8"))["peak_bytes"]) if path.exists() else 0

    def peak_figure(self) -> Dict[str, int]:
        """``peak_bytes``, if known."""
        peak = self.peak_bytes()
        return {"peak_bytes": peak} if peak else {}


def train_all(runs: Sequence[TrainingRun], workers: Workers) -> None:
    """Train those that are not trained.

    Raises:
        ConfigurationError: one was begun with other flags.
    """
    for run in runs:
        run.keep_flags()
    due = {run.label: run for run in runs if not run.is_trained()}
    workers.run(
        [run.training() for run in due.values()],
        on_end=lambda job, usage: due[job.label].training_ended(usage),
    )
