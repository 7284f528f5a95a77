"""Run a command line in a fork, and say how it ended."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import select
import signal
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from studies.fuzz.programs import enter
from tests.conftest import PACKAGE
from tests.fork_server import ForkServer

PROGRAM, PLAIN_PROGRAM = "studies.fuzz.programs:program", "studies.fuzz.programs:plain_program"
LIMIT = 120.0  # seconds, far beyond what any command takes on an idle machine

DONE = "done"
REFUSED = "refused by this package"
COMMAND_LINE = "refused by the parser of the command line"
FAIRSEQ = "fairseq's own error"
BAD = ("traceback of this package", "hang", "crash", "executed")
TRACEBACK, HANG, CRASH, EXECUTED = BAD


class Ended(NamedTuple):
    """How a command line ended.

    Attributes:
        outcome: one of the constants of this module.
        error: the last line of what it printed on stderr, if it failed; after a traceback of
            another error than ours with the places that it went through last.
        printed: all of stdout and stderr.
    """

    outcome: str
    error: str
    printed: str


def commands(argvs: Sequence[Sequence[str]], report: str, process: str) -> None:
    """In a fork: run several command lines of this package's command one after the other.

    Each is judged as if it were alone; ``report`` gets a line of JSON for each that has ended.
    """
    from spectral_fairseq.commands.main import main

    enter(process)
    for argv in argvs:
        errors = io.StringIO()
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
                status = main(list(argv))
        except BaseException:
            errors.write(traceback.format_exc())
            status = 1
        outcome, error = judged(status, errors.getvalue())
        if outcome == FAIRSEQ:
            outcome = TRACEBACK  # our own command answers for fairseq, too
        with open(report, "a") as file:
            file.write(json.dumps([outcome, error]) + "\n")


def run_all(
    server: ForkServer, argvs: Mapping[str, Sequence[Any]], folder: Path
) -> Dict[str, Ended]:
    """Run several command lines of this package's command in one fork.

    Returns:
        How each ended; those after one that took the process with it are left out.
    """
    report = folder / "report"
    texts = [[str(one) for one in argv] for argv in argvs.values()]
    last = Fork(server, [texts, str(report)], folder, f"{__name__}:commands").ended()
    lines = report.read_text().splitlines() if report.exists() else []
    ends = [Ended(outcome, error, "") for outcome, error in map(json.loads, lines)]
    return dict(zip(argvs, [*ends, last]))


class Fork:
    """A command line that runs in a fork of a server.

    Args:
        server: the server.
        argv: the command line, or other arguments of ``call``.
        folder: the working directory.
        call: ``module:function`` that the fork calls.
    """

    def __init__(
        self, server: ForkServer, argv: Sequence[Any], folder: Path, call: str = PROGRAM
    ) -> None:
        is_program = call in (PROGRAM, PLAIN_PROGRAM)
        self.argv = [str(one) for one in argv] if is_program else list(argv)
        self._number = folder / f"process-{time.monotonic_ns()}"
        self.output = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        with open(os.devnull) as nothing:
            streams = [nothing.fileno(), self.output.fileno(), self.output.fileno()]
            given = [self.argv] if is_program else self.argv
            self._running = server.start(
                *(call, *given, str(self._number)), streams=streams, cwd=folder
            )

    def printed(self) -> str:
        """What it has printed so far."""
        self.output.seek(0)
        return self.output.read()

    def wait(self, seconds: float) -> bool:
        """Wait for the end; whether it came in that time."""
        return bool(select.select([self._running._connection], [], [], seconds)[0])

    def kill(self) -> None:
        """End it as a machine that fails would."""
        while not self._number.exists() or not self._number.read_text():
            time.sleep(0.01)
        if not self.wait(0):  # else another process may have its number by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(self._number.read_text()), signal.SIGKILL)
        self._running.wait()

    def ended(self) -> Ended:
        """Wait for the end, at most :data:`LIMIT` seconds, and say what it was."""
        if not self.wait(LIMIT):
            self.kill()
            return Ended(HANG, f"no end within {LIMIT:.0f} s", self.printed())
        status = self._running.wait()
        self._number.unlink()
        printed = self.printed()
        outcome, error = judged(status, printed)
        if outcome == FAIRSEQ and self.argv[0] == "spectral-fairseq":
            outcome = TRACEBACK  # our own command answers for fairseq, too
        return Ended(outcome, error, printed)


def judged(status: int, printed: str) -> List[str]:
    """Outcome and last line of a command that has ended.

    Args:
        status: its exit status.
        printed: stdout and stderr.
    """
    if status == 0:
        return [DONE, ""]
    lines = [line for line in printed.splitlines() if line.strip()] or [""]
    last = next((one for one in reversed(lines) if not one.startswith("Exception ignored")), "")
    if last.startswith("spectral_fairseq.errors.") and ": expected " in last:
        return [REFUSED, last]
    where = re.findall(r'^  File "([^"]+)", line \d+, in ', printed, re.MULTILINE)
    if not where:
        known = re.search(r"^(spectral-fairseq|\S+\.py|fairseq\S*)( \S+)?: error: ", last)
        if known is None:
            return [CRASH, last]
        return [REFUSED if "expected " in last else COMMAND_LINE, last]
    fairseq = [f"{os.sep}fairseq{os.sep}", f"{os.sep}fairseq_cli{os.sep}"]
    inner = next(
        (
            path
            for path in reversed(where)
            if path.startswith(str(PACKAGE)) or any(part in path for part in fairseq)
        ),
        str(PACKAGE),
    )
    places = re.findall(r'^  File "[^"]*?([^"/]+/[^"/]+)", line (\d+), in ', printed, re.MULTILINE)
    last += " @ " + " < ".join(":".join(place) for place in reversed(places[-3:]))
    return [TRACEBACK if inner.startswith(str(PACKAGE)) else FAIRSEQ, last]


def run(server: ForkServer, argv: Sequence[Any], folder: Path, call: str = PROGRAM) -> Ended:
    """Run a command line to its end."""
    return Fork(server, argv, folder, call).ended()


def import_plugin() -> None:
    """In a server: import this package, so that its forks need not."""
    import spectral_fairseq.plugin  # noqa: F401


def line(kind: str, number: int, outcome: str, **more: Any) -> Dict[str, Any]:
    """One line of the record."""
    return {"kind": kind, "number": number, "outcome": outcome, **more}


def loss_of(printed: str) -> Optional[float]:
    """The loss of the last validation in a log."""
    found = re.findall(r"\| valid .*?\| loss (\S+)", printed)
    return float(found[-1]) if found else None
