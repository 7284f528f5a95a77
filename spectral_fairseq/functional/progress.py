"""What long computations call after each piece of work."""

from __future__ import annotations

from typing import Callable

ProgressCallback = Callable[[int], None]
"""Called after each piece of work with the number of rows or tokens that it had."""


def ignore_progress(_done: int) -> None:
    """Do nothing; the default callback."""
