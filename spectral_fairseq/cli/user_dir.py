"""``spectral-fairseq user-dir``: the folder to give to fairseq's ``--user-dir``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import spectral_fairseq


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``user-dir``.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers`` returned.
    """
    parser = subparsers.add_parser(
        "user-dir",
        help="print the installed package's folder, for fairseq's --user-dir",
        description="Print the folder of the installed package, from any working directory: "
        'fairseq-train DATA --user-dir "$(spectral-fairseq user-dir)" ...',
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the folder.

    Args:
        args: parsed arguments.

    Returns:
        Exit status 0.
    """
    print(Path(spectral_fairseq.__file__).resolve().parent)
    return 0
