"""``spectral-fairseq average``: the average of checkpoints, table by table."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import List, Optional

from spectral_fairseq.checkpoints.saved import EPOCH_FILE, UPDATE_FILE, checkpoint_file, paths_in
from spectral_fairseq.commands.arguments import add_no_verify
from spectral_fairseq.commands.shared import check_output, save_atomically
from spectral_fairseq.errors import (
    CheckpointError,
    ConfigurationError,
    check_enough,
    check_range,
    idle_flag,
    printable,
)
from spectral_fairseq.options import flag_of

DESCRIPTION = """\
Average checkpoints of one training run, of this package or plain. A factored table is averaged
as the matrix that it stands for and factored again, so the result is a checkpoint of the same
architecture; averaging the factors themselves would give another matrix. The options are
called as in fairseq's scripts/average_checkpoints.py. The settings are the first checkpoint's;
the optimiser state is left out.
Example: spectral-fairseq average DIR --num-epoch-checkpoints 5 --output a.pt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoints, or how to choose them, and the output."""
    add = parser.add_argument
    add(
        "checkpoints",
        nargs="*",
        metavar="CKPT",
        help="checkpoints, or one folder together with one of the --num options",
    )
    add("--inputs", nargs="+", default=(), metavar="CKPT", help="the same, under fairseq's name")
    add("--output", required=True, metavar="OUT", help="file to write")
    newest = parser.add_mutually_exclusive_group()
    newest.add_argument(
        "--num-epoch-checkpoints",
        "--last",
        type=int,
        metavar="N",
        help="the last N checkpoints of the folder saved at the end of an epoch",
    )
    newest.add_argument(
        "--num-update-checkpoints",
        type=int,
        metavar="N",
        help="the last N checkpoints of the folder saved after a number of updates",
    )
    add(
        "--checkpoint-upper-bound",
        type=int,
        metavar="N",
        help="leave out checkpoints of a later epoch, or after more updates, than this",
    )
    add("--overwrite", action="store_true", help="replace OUT if it exists")
    add_no_verify(parser)


_NUMBER = "--num-epoch-checkpoints N, --last N or --num-update-checkpoints N"


def run(args: argparse.Namespace) -> int:
    """Average the chosen checkpoints; returns the exit status 0."""
    paths = chosen_checkpoints(args)
    for path in paths:
        checkpoint_file(path)
    out = check_output(args.output, paths, args.overwrite)
    from spectral_fairseq.checkpoints.averages import average_checkpoints
    from spectral_fairseq.formats.parts import check_same_part

    check_same_part(paths)
    save_atomically(average_checkpoints(paths, args.verify), out)
    print(printable(f"{out}: the average of {', '.join(map(str, paths))}"))
    return 0


def chosen_checkpoints(args: argparse.Namespace) -> List[Path]:
    """The files that the arguments name, of a folder's the newest first."""
    for name in ("num_epoch_checkpoints", "num_update_checkpoints"):
        number = getattr(args, name)
        check_range(flag_of(name), number, at_least=1, whole=True, optional=True)
    inputs = [Path(name) for name in (*args.checkpoints, *args.inputs)]
    by_epoch = args.num_epoch_checkpoints is not None
    count: Optional[int] = args.num_epoch_checkpoints if by_epoch else args.num_update_checkpoints
    bound: Optional[int] = args.checkpoint_upper_bound
    if count is None:
        if bound is not None:
            raise idle_flag("--checkpoint-upper-bound", _NUMBER)
        if not inputs or any(os.path.isdir(path) for path in inputs):
            found = "a folder" if inputs else "none"
            remedy = f"Name files, or one folder and {_NUMBER}."
            raise ConfigurationError("checkpoint files to average", found, remedy)
        return inputs
    if len(inputs) != 1 or not os.path.isdir(inputs[0]):
        raise ConfigurationError(
            f"one existing folder together with {_NUMBER}",
            ", ".join(map(str, inputs)) or "none",
            "Name the --save-dir of the training.",
        )
    pattern = EPOCH_FILE if by_epoch else UPDATE_FILE
    numbered = [
        (int(match.groups()[-1]), path)
        for path in paths_in(inputs[0])
        for match in [pattern.fullmatch(path.name)]
        if match and (bound is None or int(match.groups()[-1]) <= bound)
    ]
    what = f"{'epoch' if by_epoch else 'update'} checkpoints in {inputs[0]}"
    remedy = (
        "Ask for fewer, or keep more in training (--keep-last-epochs, --keep-interval-updates)."
    )
    check_enough(len(numbered), count, what, remedy, CheckpointError)
    return [path for _, path in sorted(numbered, reverse=True)[:count]]
