"""``spectral-fairseq compare``: several checkpoints side by side, or one run over its epochs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, List

from spectral_fairseq.analysis.results import saved_epochs
from spectral_fairseq.cli.analyze import add_options, report
from spectral_fairseq.errors import ConfigurationError

DESCRIPTION = """\
Measure several checkpoints and put them side by side: one table, and their curves on common axes.
A folder stands for all checkpoints of its run, checkpoint<epoch>.pt and
checkpoint_<epoch>_<updates>.pt, in the order of training; with three or more of one run, the
report also draws the measures over the updates.
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``compare``.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers`` returned.
    """
    parser = subparsers.add_parser(
        "compare",
        help="put the embedding spaces of several checkpoints side by side",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "checkpoints", metavar="CKPT_OR_DIR", nargs="+", help="checkpoints, or a --save-dir"
    )
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure the named checkpoints and those of named folders.

    Args:
        args: parsed arguments.

    Returns:
        Exit status 0.

    Raises:
        ConfigurationError: fewer than two checkpoints.
    """
    paths: List[Path] = []
    for name in args.checkpoints:
        path = Path(name)
        paths += saved_epochs(path) if path.is_dir() else [path]
    if len(paths) < 2:
        raise ConfigurationError(
            "two or more checkpoints to compare", "one",
            "Name another, or a folder of several; for one alone use spectral-fairseq analyze.",
        )  # fmt: skip
    return report(args, paths, "compare")
