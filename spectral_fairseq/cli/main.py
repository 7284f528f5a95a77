"""The command ``spectral-fairseq``: reads the command line and hands over to one subcommand."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Optional, Sequence

import spectral_fairseq
from spectral_fairseq.cli import analyze, average, compare, doctor, evaluate_lm, export, user_dir
from spectral_fairseq.errors import SpectralFairseqError

SUBCOMMANDS = (analyze, compare, export, average, evaluate_lm, user_dir, doctor)
"""Modules with ``add_parser(subparsers)``, in the order in which the help shows them."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; each subcommand sets ``run``."""
    parser = argparse.ArgumentParser(
        prog="spectral-fairseq",
        description="Measure, compare, average, export and evaluate fairseq checkpoints, plain or "
        "of this package.",
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {spectral_fairseq.__version__}"
    )
    parser.add_argument(
        "--debug", action="store_true", help="show the traceback of an error as well"
    )
    subparsers = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND", required=True)
    for module in SUBCOMMANDS:
        module.add_parser(subparsers)
    return parser


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run one subcommand.

    Args:
        argv: the arguments after the command's name; those of the process if not given.

    Returns:
        Exit status: the subcommand's own, or 2 for an error that the user can mend, which is
        printed on stderr.
    """
    args = build_parser().parse_args(argv)
    # Importing fairseq sets the root logger to DEBUG, and with it every other library's.
    logging.getLogger().setLevel(logging.WARNING)
    try:
        return int(args.run(args))
    except SpectralFairseqError as error:
        if args.debug:
            raise
        print(f"spectral-fairseq {args.subcommand}: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
