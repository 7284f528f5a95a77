"""What a fork of the fuzzer becomes.

This module does not import the package: that would install the plugin where fairseq is imported
already, and some commands must run without it.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Sequence

from tests.fork_server import run_program, run_without_plugin

MEMORY = 16 * 2**30


def enter(process: str) -> None:
    """Bound the memory of this process, and write its number into a file."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    Path(process).write_text(str(os.getpid()))


def program(argv: Sequence[str], process: str) -> None:
    """Become a program."""
    enter(process)
    run_program(argv)


def plain_program(argv: Sequence[str], process: str) -> None:
    """Become a program of fairseq that must never import this package."""
    enter(process)
    run_without_plugin(argv)
