"""``spectral-fairseq repair``: new vectors for rows that training never reached."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from spectral_fairseq.commands.shared import (
    check_output,
    check_output_folder,
    naming_full_disk,
    no_verify,
    save_atomically,
)
from spectral_fairseq.errors import UnsupportedError, arguments_as_flags
from spectral_fairseq.files import making_folder, replacing
from spectral_fairseq.options import option

DESCRIPTION = """\
Give rows of the word-vector tables that look untrained new vectors: the mean of the other rows with
a small noise, or what --fill says. The model is a fairseq checkpoint (plain or of this package), a
file of safetensors, a state dict that torch saved, or a folder of a model for transformers with
such files. The input is never written to; padding and made-up words are left alone. The optimiser's
state of a fairseq checkpoint is left out, since its moments belong to the old rows. Where words
share no direction the mean is short, and analyze still names the rows; --fill normal draws them
like trained ones.
Example: spectral-fairseq repair checkpoint_best.pt --out repaired.pt
"""

_CHOICES = ("untrained", "zero", "initial", "long")
_FILLS = ("mean", "normal", "zero")
_SHOWN = 5


@dataclass
class Arguments:
    """The arguments of ``repair``."""

    model: str = option(
        "",
        "fairseq checkpoint, *.safetensors, state dict, or folder of a model",
        metavar="MODEL",
        positional=True,
    )
    out: str = option("", "file, or folder, to write", metavar="FILE", required=True)
    rows: Tuple[str, ...] = option(
        (),
        "which rows: untrained (zero, equal to another row, or unusually short: the finding of "
        "analyze), zero, initial (of --initial-length), long (outliers); default: untrained",
        choices=_CHOICES,
        nargs="+",
    )
    fill: str = option(
        "mean",
        "new rows: the mean of the others with a small noise, normal (drawn like one of them) or "
        "zero",
        choices=_FILLS,
    )
    noise: float = option(
        0.01, "of the mean, as a share of each column's standard deviation", at_least=0
    )
    initial_length: Optional[float] = option(
        None, "length of a row at the start of the training, for --rows initial", above=0
    )
    table: Optional[str] = option(
        None, "the only table to repair (default: all tables of words)", metavar="NAME"
    )
    seed: int = option(1, "of the noise", at_least=0)
    overwrite: bool = option(False, "replace FILE if it exists; a folder is never replaced")
    verify: bool = no_verify()


def run(args: Arguments) -> int:
    """Repair one model; returns the exit status 0."""
    source = Path(args.model)
    is_folder = os.path.isdir(source)
    if is_folder:
        out = check_output_folder(args.out, [source], ["config.json"], overwrite=False)
    else:
        out = check_output(args.out, [source], args.overwrite)
    from spectral_fairseq.checkpoints.opening import open_model
    from spectral_fairseq.checkpoints.rewriting import repair_tables

    opened = open_model(source)
    flags = {"rows": "--rows", "fill": "--fill", "initial_length": "--initial-length"}
    names = ("rows", "fill", "noise", "initial_length", "seed")
    with arguments_as_flags(**flags):
        how: Dict[str, Any] = {name: getattr(args, name) for name in names}
        how["rows"] = args.rows or _CHOICES[:1]
        done, changed = repair_tables(opened, args.table, **how)
    for table in done:
        print("\n".join(_lines(table)))
    if not changed:
        print(f"Nothing to repair, so nothing was written to {out}.")
        return 0
    with naming_full_disk(out, "choose another --out"):
        _write(opened, changed, source, out, args.verify)
    print(f"{out}: {args.model} with {sum(len(table.rows) for table in done):,} rows repaired")
    return 0


def _in_parts(source: Path) -> UnsupportedError:
    remedy = "Give the model's folder, or join the parts first."
    return UnsupportedError(f"a model in one file, as {source}", "one of several parts", remedy)


def _write(opened: Any, changed: Dict[str, Any], source: Path, out: Path, verify: bool) -> None:
    from spectral_fairseq.checkpoints.rewriting import with_tensors, write_folder, write_weights

    if opened.checkpoint:
        from spectral_fairseq.checkpoints.reading import load_checkpoint

        if opened.files:
            raise _in_parts(source)
        save_atomically(with_tensors(load_checkpoint(source, verify), changed), out)
    elif os.path.isdir(source):
        with making_folder(out) as folder:
            write_folder(opened, changed, folder)
    elif opened.files or opened.weights != source:
        raise _in_parts(source)
    else:
        with replacing(out) as partial:
            write_weights(source, changed, partial)


def _lines(table: Any) -> List[str]:
    name, rows = table.names[0], len(table.rows)
    shared = f" (= {', '.join(table.names[1:])})" if table.names[1:] else ""
    lines = [f"{name}{shared}, {table.shape[0]:,} x {table.shape[1]:,}: {rows:,} rows to repair"]
    if rows:
        shown = table.words[:_SHOWN] or [f"row {row}" for row in table.rows[:_SHOWN]]
        lines[0] += f", {', '.join(shown)}" + (", ..." if rows > _SHOWN else "")
        lines.append(f"  {'':<28} {'before':>10} {'after':>10}")
        lines += [
            f"  {key:<28} {value:>10.4g} {table.after[key]:>10.4g}"
            for key, value in table.before.items()
        ]
    return lines
