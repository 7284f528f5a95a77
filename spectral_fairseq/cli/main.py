"""The command ``spectral-fairseq``: reads the command line and hands over to one subcommand."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from types import ModuleType
from typing import Optional, Sequence, Tuple

import spectral_fairseq
from spectral_fairseq.cli import average, doctor, user_dir
from spectral_fairseq.cli.output import print_anywhere
from spectral_fairseq.compat import why_not_importable
from spectral_fairseq.errors import SpectralFairseqError, UnsupportedError

SUBCOMMANDS: Tuple[ModuleType, ...] = (average, user_dir, doctor)
if why_not_importable() is None:
    from spectral_fairseq.cli import analyze, compare, evaluate_lm, export

    SUBCOMMANDS = (analyze, compare, export, average, evaluate_lm, user_dir, doctor)
"""Modules with ``add_parser(subparsers)``, in the order in which the help shows them.

Without fairseq there are those that need none: the doctor above all, who says what is wrong.
"""

NEED_FAIRSEQ = ("analyze", "compare", "export", "evaluate-lm")


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
        Exit status: the subcommand's own; 2 for an error that the user can mend, which is printed
        on stderr; as in a shell 130 after Ctrl-C, and 141 where nobody reads the output any more.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    named = next((one for one in arguments if not one.startswith("-")), "")
    obstacle = why_not_importable()
    if obstacle is not None and named in NEED_FAIRSEQ:
        missing = UnsupportedError(
            "a fairseq that can be imported", obstacle,
            "Run spectral-fairseq doctor; docs/compatibility.md has the versions that go together.",
        )  # fmt: skip
        return _failed(named, missing)
    args = build_parser().parse_args(arguments)
    # Importing fairseq sets the root logger to DEBUG, and with it every other library's.
    logging.getLogger().setLevel(logging.WARNING)
    print_anywhere()
    try:
        status = int(args.run(args))
        sys.stdout.flush()  # here, where the end of a pipe can still be answered
        return status
    except SpectralFairseqError as error:
        if args.debug:
            raise
        return _failed(args.subcommand, error)
    except KeyboardInterrupt:
        if args.debug:
            raise
        print(f"\nspectral-fairseq {args.subcommand}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python flushes once more at the end, into nothing now.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _failed(subcommand: str, error: SpectralFairseqError) -> int:
    print(f"spectral-fairseq {subcommand}: error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
