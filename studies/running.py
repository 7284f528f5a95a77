"""Run commands side by side, with their output in files and their progress on bars."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    Any,
    Callable,
    Dict,
    List,
    NoReturn,
    Optional,
    Sequence,
    TextIO,
    Tuple,
)

from tqdm import tqdm

from benchmarks.harness import KEEP_FREED_MEMORY
from spectral_fairseq.errors import DataError, SpectralFairseqError
from studies.machine import find_command

POLL_SECONDS = 0.3
GRACE_SECONDS = 10.0
LINES_SHOWN = 15

# A line of output -> (progress, text beside the bar), or None for a line that shows no progress.
Progress = Callable[[str], Optional[Tuple[int, str]]]


class JobFailed(SpectralFairseqError, RuntimeError):
    """A command ended with an error."""


def no_progress(_line: str) -> None:
    """The :data:`Progress` of a command that prints none."""


def json_document(log: Path) -> Dict[str, Any]:
    """The last JSON object that stands on a line of its own in a command's output.

    Raises:
        DataError: there is none.
    """
    for line in reversed(log.read_text("utf-8", "replace").split("\n")):
        if line.startswith("{"):
            document: Dict[str, Any] = json.loads(line)
            return document
    raise DataError(f"a line of JSON in {log}", "none", "Give the same command again.")


@dataclass
class Job:
    """A command to run.

    Args:
        label: shown beside its bar.
        command: name of an installed command, then its arguments.
        log: file to which its output is appended.
        total: what the bar counts to.
        unit: what the bar counts.
        progress: is given every line of the output.
    """

    label: str
    command: Sequence[str]
    log: Path
    total: int
    unit: str
    progress: Progress


@dataclass
class Usage:
    """How a job ended, the peak resident memory of its process, and the processor time it took."""

    exit_status: int
    peak_bytes: int
    processor_seconds: float


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    output: TextIO
    position: int
    tail: List[str] = field(default_factory=list)
    unfinished: str = ""
    bar: Optional[tqdm[None]] = None
    shown: int = -1


def run_jobs(
    jobs: Sequence[Job],
    *,
    at_once: int,
    threads: int,
    gpu: bool,
    lock_fd: int,
    on_end: Callable[[Job, Usage], None] = lambda _job, _usage: None,
) -> None:
    """Run jobs in order, several of them at once, until all have ended.

    No process is left behind when one fails or the run is interrupted.

    Args:
        jobs: what to run.
        at_once: how many run side by side; when one ends the next begins.
        threads: number of threads of each process.
        gpu: whether the processes may see the GPU.
        lock_fd: descriptor of the lock that they inherit.
        on_end: called when a process has ended, successfully or not.

    Raises:
        JobFailed: a command failed.
    """
    env = {**KEEP_FREED_MEMORY, **os.environ, "PYTHONUNBUFFERED": "1"}
    env.update({name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")})
    if not gpu:
        env["CUDA_VISIBLE_DEVICES"] = ""
    waiting: List[Job] = list(jobs)
    running: List[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                position = min(set(range(at_once)) - {one.position for one in running})
                running.append(_start(waiting.pop(0), env, lock_fd, position))
            time.sleep(POLL_SECONDS)
            for one in list(running):
                if _has_ended(one, on_end):
                    running.remove(one)
    finally:
        _stop(running, on_end)


def _start(job: Job, env: Dict[str, str], lock_fd: int, position: int) -> _Running:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    command = [find_command(job.command[0]), *job.command[1:]]
    with open(job.log, "ab") as log:
        before = log.tell()
        # In a new session Ctrl-C reaches only this process, which then ends the others.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
            pass_fds=(lock_fd,),
        )
        output = open(job.log, encoding="utf-8", errors="replace")
        output.seek(before)  # skip the output of an interrupted run
    return _Running(job, process, output, position)


def _has_ended(one: _Running, on_end: Callable[[Job, Usage], None]) -> bool:
    ended = _reap(one, os.WNOHANG, on_end)
    _show(one)
    if not ended:
        return False
    _close(one)
    if one.process.returncode != 0:
        raise JobFailed(
            f"{one.job.command[0]} ({one.job.label}) to succeed",
            f"exit status {one.process.returncode}; the end of {one.job.log}:\n"
            + "\n".join(one.tail)
            + "\n",
            "The message above says why; the same command goes on from here.",
        )
    return True


def _reap(one: _Running, options: int, on_end: Callable[[Job, Usage], None]) -> bool:
    """Whether the process has ended. Its exit status and resource usage are collected here."""
    if one.process.returncode is not None:
        return True
    pid, status, usage = os.wait4(one.process.pid, options)
    if pid == 0:
        return False
    one.process.returncode = os.waitstatus_to_exitcode(status)
    in_bytes = 1 if sys.platform == "darwin" else 1024
    seconds = usage.ru_utime + usage.ru_stime
    on_end(one.job, Usage(one.process.returncode, usage.ru_maxrss * in_bytes, seconds))
    return True


def _show(one: _Running) -> None:
    *lines, one.unfinished = (one.unfinished + one.output.read()).split("\n")
    one.tail = (one.tail + [line for line in lines if line.strip()])[-LINES_SHOWN:]
    latest = None
    for line in lines:
        latest = one.job.progress(line) or latest
    if latest is None:
        return
    done, note = latest
    if sys.stderr.isatty():
        if one.bar is None:
            one.bar = tqdm(
                total=one.job.total,
                initial=done,
                desc=f"  {one.job.label:<16}",
                unit=one.job.unit,
                position=one.position,
                dynamic_ncols=True,
            )
        one.bar.set_postfix_str(note, refresh=False)
        one.bar.update(done - one.bar.n)
    else:  # bars would fill a log file, so print a line for each tenth
        tenth = 10 * done // one.job.total
        if tenth > one.shown:
            one.shown = tenth
            print(
                f"  {one.job.label}: {done} of {one.job.total} {one.job.unit.strip()}  {note}",
                file=sys.stderr,
                flush=True,
            )


def _close(one: _Running) -> None:
    one.output.close()
    if one.bar is not None:
        one.bar.close()


def _stop(running: Sequence[_Running], on_end: Callable[[Job, Usage], None]) -> None:
    left = [one for one in running if one.process.returncode is None]
    for one in left:
        one.process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for one in left:
        while not _reap(one, os.WNOHANG, on_end):
            if time.monotonic() > deadline:
                one.process.kill()
                _reap(one, 0, on_end)
                break
            time.sleep(0.05)
        _close(one)


def _interrupted(_signal_number: int, _frame: Any) -> NoReturn:
    """Signal handler that treats termination and a closed terminal like Ctrl-C."""
    raise KeyboardInterrupt


def exit_status(action: Callable[[], str], work_dir: Path) -> int:
    """Run a job, print the text it returns, and report expected errors in one line.

    Args:
        action: the job. It imports torch and fairseq itself, which takes seconds, so that
            ``--help`` and mistakes on the command line are answered at once.
        work_dir: the folder that the error message names when it cannot be written.

    Returns:
        The exit status: 0, 1 after an error that was printed, 130 after an interruption.
    """
    signal.signal(signal.SIGTERM, _interrupted)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, _interrupted)  # the terminal was closed
    logging.disable(logging.INFO)  # fairseq sets the level of every library's log when imported
    try:
        from spectral_fairseq.commands.shared import print_anywhere

        print_anywhere()
        print(action(), end="")
        return 0
    except ModuleNotFoundError as error:
        print(
            f"error: expected the Python package {error.name}; found none for {sys.executable}. "
            "Run `make setup`, and use .venv/bin/python.",
            file=sys.stderr,
        )
    except SpectralFairseqError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ENOTDIR):
            raise
        print(
            f"error: expected to write into {work_dir}; found {error}. "
            "Make room or give another --work-dir; the same command then goes on.",
            file=sys.stderr,
        )
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):  # the terminal may be closed
            print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 1
