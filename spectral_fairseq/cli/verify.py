"""``--no-verify``, which every subcommand that reads checkpoints takes."""

from __future__ import annotations

import argparse

NO_VERIFY = "--no-verify"


def add_no_verify(parser: argparse.ArgumentParser) -> None:
    """Add the flag, which makes ``verify`` false.

    Args:
        parser: of a subcommand.
    """
    parser.add_argument(
        NO_VERIFY,
        dest="verify",
        action="store_false",
        help="do not compare checkpoints with the checksums in them, which reads a huge file once "
        "more",
    )
