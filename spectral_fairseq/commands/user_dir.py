"""``spectral-fairseq user-dir``: the folder to give to fairseq's ``--user-dir``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import spectral_fairseq

DESCRIPTION = """\
Print the folder of the installed package, from any working directory.
Example: fairseq-train DATA --user-dir "$(spectral-fairseq user-dir)" ...
"""


@dataclass
class Arguments:
    """There are none."""


def run(_: Arguments) -> int:
    """Print the folder; returns the exit status 0."""
    print(Path(spectral_fairseq.__file__).resolve().parent)
    return 0
