"""``spectral-fairseq user-dir``: the folder to give to fairseq's ``--user-dir``."""

from __future__ import annotations

import argparse
from pathlib import Path

import spectral_fairseq

DESCRIPTION = """\
Print the folder of the installed package, from any working directory.
Example: fairseq-train DATA --user-dir "$(spectral-fairseq user-dir)" ...
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(_: argparse.Namespace) -> int:
    """Print the folder; returns the exit status 0."""
    print(Path(spectral_fairseq.__file__).resolve().parent)
    return 0
