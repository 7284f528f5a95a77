"""Options shared by the commands that compare methods."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Collection, Tuple


def comparison_parser(
    description: str, methods: Collection[str], updates: int, work_dir: str, epoch: str = ""
) -> argparse.ArgumentParser:
    """A parser with the options that choose the trainings, their folder and their number at once.

    Args:
        description: description of the command.
        methods: names of the methods.
        updates: default number of updates of each training.
        work_dir: default work folder.
        epoch: a remark on the number of updates of an epoch.
    """
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2], metavar="N", help="default: 1 2")
    add(
        "--methods",
        nargs="+",
        choices=list(methods),
        default=list(methods),
        metavar="METHOD",
        help=f"default: all of {', '.join(methods)}",
    )
    add(
        "--updates",
        type=int,
        default=updates,
        metavar="N",
        help=f"of each training{epoch} (default: %(default)s)",
    )
    add(
        "--work-dir",
        type=Path,
        default=Path(work_dir),
        metavar="DIR",
        help="everything is written here (default: %(default)s)",
    )
    add(
        "--at-once",
        type=int,
        default=2,
        metavar="N",
        help="trainings side by side on a CPU, each with its share of the cores "
        "(default: %(default)s)",
    )
    add("--cpu", action="store_true", help="leave the GPU alone")
    return parser


def add_sizes(
    parser: argparse.ArgumentParser, defaults: object, sizes: Collection[Tuple[str, str]]
) -> None:
    """Add options for sizes, with the defaults of a class of settings.

    Args:
        parser: receives the options.
        defaults: has an attribute for each of them.
        sizes: pairs of a flag without its dashes and a description.
    """
    for flag, of_what in sizes:
        parser.add_argument(
            f"--{flag}",
            type=int,
            default=getattr(defaults, flag.replace("-", "_")),
            metavar="N",
            help=f"{of_what} (default: %(default)s)",
        )
