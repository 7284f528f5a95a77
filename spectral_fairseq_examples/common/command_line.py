"""Report errors of the examples' commands in one line, and let interruptions be resumed."""

from __future__ import annotations

import contextlib
import errno
import logging
import signal
import sys
from pathlib import Path
from typing import Any, Callable, NoReturn

from spectral_fairseq.errors import SpectralFairseqError


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
        from spectral_fairseq.cli.output import print_anywhere  # imports torch

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
