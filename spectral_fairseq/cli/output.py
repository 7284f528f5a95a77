"""Files that the subcommands write: never an input, never half, nothing replaced unasked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Sequence, Union

import torch

from spectral_fairseq.errors import ConfigurationError

PathLike = Union[str, Path]


def check_output(out: PathLike, inputs: Sequence[PathLike], overwrite: bool) -> Path:
    """Refuse an unusable output before any work is done.

    Args:
        out: the file to write.
        inputs: the files to read.
        overwrite: whether ``out`` may exist.

    Returns:
        ``out`` as a path.

    Raises:
        ConfigurationError: it is an input, a folder, in no folder, or exists already.
    """
    target = Path(out)
    if any(target.resolve() == Path(path).resolve() for path in inputs):
        raise ConfigurationError(
            "an output that is not an input", f"{out} as both", "Choose another output file."
        )
    if target.is_dir():
        raise ConfigurationError(f"a file name for {out}", "a folder", "Name a file inside it.")
    if not target.parent.is_dir():
        raise ConfigurationError(
            f"the folder {target.parent} to exist", "no such folder", "Create it first."
        )
    if target.exists() and not overwrite:
        raise ConfigurationError(
            f"no file at {out} yet", "one", "Add --overwrite to replace it, or choose another name."
        )
    return target


def save_atomically(checkpoint: Any, out: Path) -> None:
    """Write ``checkpoint`` next to ``out``, then rename: ``out`` is the old file or the whole new.

    Args:
        checkpoint: anything that ``torch.save`` takes.
        out: the file.
    """
    partial = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, out)
    finally:
        if partial.exists():
            partial.unlink()
