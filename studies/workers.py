"""The share of the machine that each command gets."""

from __future__ import annotations

from typing import (
    Any,
    Sequence,
)

from studies.machine import available_cores
from studies.running import Job, run_jobs
from studies.work_folder import WorkDir


class Workers:
    """Runs commands one at a time on a GPU, or several at a time that share the CPU's cores.

    Args:
        work: the work folder, whose lock the commands inherit.
        device: ``cpu`` or ``cuda``.
        at_once: the largest number of commands side by side on a CPU.
    """

    def __init__(self, work: WorkDir, device: str, at_once: int) -> None:
        cores = available_cores()
        self.work, self.gpu = work, device == "cuda"
        self.at_once = 1 if self.gpu else max(1, min(at_once, cores))
        self.threads = max(1, cores // self.at_once)

    def run(self, jobs: Sequence[Job], **options: Any) -> None:
        """See :func:`studies.running.run_jobs`."""
        run_jobs(
            jobs,
            at_once=self.at_once,
            threads=self.threads,
            gpu=self.gpu,
            lock_fd=self.work.lock.fileno(),
            **options,
        )
