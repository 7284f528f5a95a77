"""What the command lines of the subcommands share."""

from __future__ import annotations

import argparse
from typing import Any

NO_VERIFY = "--no-verify"


class Rare(str):
    """The help of an argument that only ``--help-all`` shows."""


def add_no_verify(parser: Any) -> None:
    """Add the flag that makes ``verify`` false."""
    parser.add_argument(
        NO_VERIFY,
        dest="verify",
        action="store_false",
        help=Rare(
            "do not compare checkpoints with the checksums in them, which reads a huge file once "
            "more"
        ),
    )


def add_format(parser: Any) -> None:
    """Add the choice between text and JSON."""
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="format of what is printed"
    )


def add_no_progress(parser: Any) -> None:
    """Add the flag that hides progress bars."""
    parser.add_argument(
        "--no-progress", action="store_true", help=Rare("show no progress bar (terminals only)")
    )


def numbers(text: str) -> Any:
    """The numbers in ``0.1,0.2``, as the ``type`` of an argument.

    Raises:
        ArgumentTypeError: something else.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers separated by commas, found {text!r}"
        ) from None
