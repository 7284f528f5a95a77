"""A training that is killed at any moment goes on as if nothing had happened.

A training saves a checkpoint after every update. It is killed with SIGKILL, started again with the
same command, and its last checkpoint must equal that of a training that was left alone, bit by bit.
"""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path
from typing import Any, Dict, List

import torch

from spectral_fairseq.checkpoints.reading import load_checkpoint, tensors_of
from studies.fuzz.files import TRAINING
from studies.fuzz.forks import BAD, DONE, LIMIT, Fork, line, run
from studies.fuzz.training import PLUGIN
from tests.fork_server import ForkServer

UPDATES = 12
UNLIKE, ENDED = "went on otherwise", "ended before it was killed"
FAILURES = (*BAD, UNLIKE)

STATEFUL = (
    *("--arch", "awd_lstm_ptb", "--task", "stateful_language_modeling", "--criterion"),
    *("mle_cosreg", "--decoder-embed-dim", "16", "--decoder-hidden-size", "16"),
    *("--decoder-layers", "1", "--optimizer", "nt_asgd", "--lr-scheduler", "nt_asgd", "--lr", "1"),
    *("--batch-size", "2", "--batch-size-valid", "2", "--tokens-per-sample", "5"),
    *("--num-workers", "0", "--data-buffer-size", "0", "--log-format", "simple"),
    *("--log-interval", "1"),
)
# Within one epoch fairseq's own iterator resumes exactly.
TRAININGS = {"transformer_lm_sc": (*TRAINING, "--max-tokens", "16"), "awd_lstm_ptb": STATEFUL}


class Kills:
    """Runs the cases.

    Args:
        server: forks that have imported this package.
        data: folder of the monolingual corpus.
        folder: scratch.
    """

    def __init__(self, server: ForkServer, data: Path, folder: Path) -> None:
        self._server, self._data, self._folder = server, data, folder

    def run(self, number: int) -> Dict[str, Any]:
        """Run the case of a number; returns its line of the record."""
        chance = random.Random(f"kill {number}")
        name = sorted(TRAININGS)[number % len(TRAININGS)]
        alone = self._folder / f"alone-{name}"
        if not (alone / "checkpoint_last.pt").exists():
            shutil.rmtree(alone, ignore_errors=True)
            ended = run(self._server, self._command(name, alone), self._make())
            if ended.outcome != DONE:
                return line("kill", number, ended.outcome, training=name, error=ended.error)
        killed = self._folder / "killed"
        shutil.rmtree(killed, ignore_errors=True)
        fork = Fork(self._server, self._command(name, killed), self._make())
        moment = chance.randint(0, UPDATES - 1)
        self._wait_for(fork, moment)
        time.sleep(chance.random() * 0.2)
        fork.kill()
        saved = sorted(path.name for path in killed.glob("*")) if killed.exists() else []
        outcome, error = ENDED, ""
        if updates_of(killed) < UPDATES:
            outcome, error, _ = run(self._server, self._command(name, killed), self._make())
        if outcome in (DONE, ENDED) and not _equal(alone, killed):
            outcome = UNLIKE
        return line(
            *("kill", number, outcome),
            training=name,
            after_update=moment,
            files=saved,
            error=error,
        )

    def _make(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder

    def _command(self, name: str, save: Path) -> List[Any]:
        argv = ["fairseq-train", self._data, *PLUGIN, *TRAININGS[name], "--cpu", "--seed", 1]
        argv += ["--max-update", UPDATES, "--save-interval-updates", 1, "--save-dir", save]
        return [*argv, "--keep-interval-updates", 2]

    def _wait_for(self, fork: Fork, update: int) -> None:
        end = time.monotonic() + LIMIT
        while f"num_updates={update}" not in fork.printed().replace("num_updates ", "num_updates="):
            if update == 0 or fork.wait(0.02) or time.monotonic() > end:
                return


def updates_of(folder: Path) -> int:
    """The updates that the last checkpoint of a training has seen; 0 if it has none.

    It decides whether a training is started again, and not whether its process was still there: one
    that is killed between its last checkpoint and its exit has ended, and fairseq takes one update
    more in a training that has ended and is started again.
    """
    last = folder / "checkpoint_last.pt"
    return load_checkpoint(last)["optimizer_history"][-1]["num_updates"] if last.exists() else 0


def _equal(one: Path, other: Path) -> bool:
    """Whether two trainings ended with the same model."""
    first, second = (
        tensors_of(load_checkpoint(folder / "checkpoint_last.pt")["model"])
        for folder in (one, other)
    )
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )
