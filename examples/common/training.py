"""A training that is done once, however often it is interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import List, Sequence

from fairseq_log import TrainingProgress
from jobs import Job, Usage
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
    """

    def __init__(
        self, label: str, work: WorkDir, folder: Path, command: List[str], updates: int
    ) -> None:
        self.label, self.work, self.folder = label, work, folder
        self.train_command, self.updates = command, updates
        self.best = folder / "checkpoints" / "checkpoint_best.pt"
        self.stamp = "train_" + "_".join(folder.relative_to(work.root).parts)

    def is_trained(self) -> bool:
        """Whether training came to its end. It must not be started again then.

        fairseq would make one more update.
        """
        return self.work.is_done(self.stamp)

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
        """Peak resident memory noted so far; 0 if none."""
        path = self.folder / "memory.json"
        return int(json.loads(path.read_text("utf-8"))["peak_bytes"]) if path.exists() else 0


def train_all(runs: Sequence[TrainingRun], workers: Workers) -> None:
    """Train those that are not trained."""
    due = {run.label: run for run in runs if not run.is_trained()}
    workers.run(
        [run.training() for run in due.values()],
        on_end=lambda job, usage: due[job.label].training_ended(usage),
    )
