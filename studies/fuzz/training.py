"""One combination of options: trained, reloaded, evaluated alike; or refused before it trains.

What must hold:

- A training ends after two updates with a checkpoint and finite losses, or in one error before the
  first update. The error is never a traceback from the depths of this package.
- fairseq-validate takes the checkpoint and finds the loss that training found, as it does from the
  average of the checkpoint with itself, and from its export, which plain fairseq loads.
- Every other command reads the checkpoint or refuses it in one line, and training goes on from it.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from studies.fuzz import space
from studies.fuzz.forks import (
    BAD,
    CRASH,
    DONE,
    FAIRSEQ,
    PLAIN_PROGRAM,
    REFUSED,
    TRACEBACK,
    Ended,
    line,
    loss_of,
    run,
)
from tests.conftest import PACKAGE
from tests.fork_server import ForkServer

PLUGIN = ("--user-dir", str(PACKAGE))
# Losses are printed with three digits; half precision differs between training and evaluation.
TOLERANCE, TOLERANCE_HALF = 2e-3, 5e-2
UNLIKE, LATE, NAN = "evaluated otherwise", "refused after an update", "not finite"
FAILURES = (*BAD, UNLIKE, LATE, NAN)
# They read what this package has written, and may not refuse it.
ESSENTIAL = ("validate", "validate average", "validate export", "resume")


def _allowed(command: str) -> Tuple[str, ...]:
    """The outcomes of a command that are no failure."""
    return (DONE, FAIRSEQ) if command in ESSENTIAL else (DONE, FAIRSEQ, REFUSED)


class Options:
    """Runs the cases.

    Args:
        server: forks that have imported this package.
        without_plugin: forks that have not.
        data: folders of :mod:`studies.fuzz.data`.
        folder: scratch; emptied by every case.
    """

    def __init__(
        self, server: ForkServer, without_plugin: ForkServer, data: Path, folder: Path
    ) -> None:
        self._server, self._without_plugin = server, without_plugin
        self._data, self._folder = data, folder

    def run(self, number: int, case: Optional[space.Case] = None) -> Dict[str, Any]:
        """Run the case of a number; returns its line of the record."""
        case = case or space.draw(number)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        first = self._train(case, updates=2)
        found = {"argv": case.argv, "data": case.data, "error": first.error[:400]}
        if first.outcome != DONE:
            outcome = first.outcome
            if outcome in (REFUSED, TRACEBACK, CRASH) and "train_inner" in first.printed:
                outcome = LATE
            return line("options", number, outcome, **found)
        trained = loss_of(first.printed)
        commands = {name: check for name, check in self._checks(case, trained).items() if check}
        outcome = DONE
        if trained is None or not math.isfinite(trained):
            outcome = FAIRSEQ if self._is_fairseqs(case) else NAN
        bad = [name for name, what in commands.items() if what not in _allowed(name)]
        if bad and outcome == DONE:
            outcome = commands[bad[0]]
            found["error"] = f"{bad[0]}: {self._errors.get(bad[0], '')[:400]}"
        return line("options", number, outcome, **found, loss=trained, commands=commands)

    def _train(self, case: space.Case, updates: int, plugin: bool = True) -> Ended:
        argv = ["fairseq-train", self._data / case.data, *(PLUGIN if plugin else ()), *case.argv]
        argv += ["--cpu", "--max-update", updates]
        argv += ["--save-dir", self._folder / ("saved" if plugin else "plain")]
        argv += ["--num-workers", 0, "--data-buffer-size", 0, "--log-format", "simple"]
        argv += ["--log-interval", 1, "--seed", 1]
        return self._run(argv, plugin)

    def _run(self, argv: List[Any], plugin: bool) -> Ended:
        if plugin:
            return run(self._server, argv, self._folder)
        return run(self._without_plugin, argv, self._folder, PLAIN_PROGRAM)

    def _is_fairseqs(self, case: space.Case) -> bool:
        """Whether fairseq alone takes the case, and finds no finite loss either."""
        alone = self._train(case, updates=2, plugin=False)
        loss = loss_of(alone.printed)
        return alone.outcome == DONE and loss is not None and not math.isfinite(loss)

    def _checks(self, case: space.Case, trained: Optional[float]) -> Dict[str, str]:
        self._errors: Dict[str, str] = {}
        path, average = self._folder / "saved" / "checkpoint_last.pt", self._folder / "average.pt"
        plain = self._folder / "plain.pt"
        data = self._data / case.data
        half = bool(space.HALF & set(case.argv))

        def validated(name: str, path: Path, without_plugin: bool = False) -> str:
            if not path.exists():
                return ""
            task = case.task
            argv: List[Any] = ["fairseq-validate", data, "--path", path, "--cpu", "--task", task]
            argv += ["--required-batch-size-multiple", 1, "--log-format", "simple"]
            argv += [] if without_plugin else PLUGIN
            batch = ("--batch-size", 2) if task.startswith("stateful") else ("--max-tokens", 96)
            ended = self._run([*argv, *batch], plugin=not without_plugin)
            if ended.outcome != DONE:
                self._errors[name] = ended.error
                return ended.outcome
            found = loss_of(ended.printed)
            tolerance = TOLERANCE_HALF if half else TOLERANCE
            if found is None or trained is None or not abs(found - trained) <= tolerance:
                self._errors[name] = f"loss {found}, in training {trained}"
                return UNLIKE
            return DONE

        def command(name: str, *argv: Any) -> str:
            ended = run(self._server, argv, self._folder)
            self._errors[name] = ended.error
            return ended.outcome

        tool = "spectral-fairseq"
        found = {"validate": validated("validate", path)}
        found["analyze"] = command("analyze", tool, "analyze", path, "--data", data)
        found["average"] = command("average", tool, "average", path, path, "--output", average)
        found["validate average"] = validated("validate average", average)
        found["export"] = command("export", tool, "export", path, plain)
        # The training's criterion is fairseq's own in an exported checkpoint.
        found["validate export"] = validated("validate export", plain, without_plugin=True)
        if case.task.startswith("stateful"):
            found["evaluate-lm"] = command("evaluate-lm", tool, "evaluate-lm", path, data, "--cpu")
        elif case.data != "language":
            found["generate"] = command(
                *("generate", "fairseq-generate", data, *PLUGIN, "--path", path, "--cpu"),
                *("--beam", 2, "--max-len-b", 5, "--max-tokens", 96),
            )
        resumed = self._train(case, updates=3)
        self._errors["resume"] = resumed.error
        found["resume"] = resumed.outcome
        return found
