"""Output of the subcommands: files written whole or not at all, and text for any terminal."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence, Union

from spectral_fairseq.errors import (
    ConfigurationError,
    DataError,
    OutputError,
    SpectralFairseqError,
    first_line,
)
from spectral_fairseq.files import check_file, check_free, check_parent, read_text, replacing

PathLike = Union[str, Path]


def print_anywhere() -> None:
    """Make stdout print escapes for characters that the terminal lacks, rather than fail.

    A standard stream that was closed, as by ``2>&-``, is replaced by an empty one: progress bars
    call its methods, and print() would write to stdout in its place.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def text_with_sentences(name: str, flag: str) -> str:
    """The text of a file, or of standard input if ``name`` is ``-``; ``flag`` gave the name.

    Raises:
        DataError: it is no file, or not UTF-8.
    """
    what, remedy = "text with one sentence a line", f"Correct {flag}; - reads standard input."
    if name != "-":
        check_file(name, what, remedy, DataError)
        return read_text(Path(name), DataError, remedy)
    try:
        return sys.stdin.read().removeprefix("\ufeff")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{what} in {name}", first_line(error), remedy) from error


def check_output(out: PathLike, inputs: Sequence[PathLike], overwrite: bool) -> Path:
    """Refuse an unusable output file before any work is done; returns it as a path."""
    target = Path(out)
    if any(target.resolve() == Path(path).resolve() for path in inputs):
        wanted = "an output that is not an input"
        raise ConfigurationError(wanted, f"{out} as both", "Choose another output file.")
    folder = target.resolve().parent  # a link stays, and what it points to is written
    if os.path.isdir(target):
        raise ConfigurationError(f"a file name for {out}", "a folder", "Name a file inside it.")
    check_parent(out, folder)
    check_free(out, "a file" if os.path.exists(target) else "", overwrite)
    return target


def check_output_folder(
    out: PathLike, inputs: Sequence[PathLike], names: Sequence[str], overwrite: bool
) -> Path:
    """Refuse an unusable output folder before any work is done; returns it as a path.

    Args:
        out: the folder to make.
        inputs: the files and folders to read.
        names: patterns of what such a folder holds, first a file that every one has. A folder
            without that file, or with anything else in it, is never replaced.
        overwrite: whether ``out`` may be such a folder.
    """
    target = Path(out)
    whole = target.resolve()
    for path in map(Path, inputs):
        if whole in (path.resolve(), *path.resolve().parents):
            wanted = "an output that holds no input"
            raise ConfigurationError(wanted, f"{path} in {out}", "Choose another folder.")
    check_parent(out, target.resolve().parent)
    wanted, remedy = f"a folder that can be replaced at {out}", "Name a folder inside it."
    if os.path.isdir(target) and os.path.samefile(target, "."):
        # The shell that started the command would stay in the folder that was replaced.
        raise ConfigurationError(wanted, "the working directory", remedy)
    if os.path.isdir(target) and os.path.ismount(target):  # the system keeps it in its place
        raise ConfigurationError(wanted, "a mounted folder", remedy)
    if os.path.isdir(target) and not any(target.iterdir()):
        return target
    found = "a folder" if os.path.isdir(target) else "a file"
    check_free(out, found if os.path.exists(target) else "", overwrite)
    there = sorted(os.listdir(target)) if os.path.isdir(target) else []
    other = [name for name in there if not any(fnmatch(name, pattern) for pattern in names)]
    if os.path.exists(target) and (other or not os.path.isfile(target / names[0])):
        raise ConfigurationError(
            f"nothing at {out} but a folder with {names[0]}, as an earlier export wrote it",
            other[0] if other else "something else",
            "Move it away, or choose another name.",
        )
    return target


def save_atomically(checkpoint: Any, out: Path) -> None:
    """Write a checkpoint: ``out`` is the old file or the whole new one, the same bytes each time.

    torch would write the name of a file that it is given into it, where the partial one has a
    random name; so it is given a stream, as by fairseq.
    """
    import torch

    from spectral_fairseq.checkpoints.stand_ins import pickle_by_name

    with naming_full_disk(out), replacing(out) as partial, open(partial, "wb") as stream:
        torch.save(checkpoint, stream, pickle_module=pickle_by_name())


@contextlib.contextmanager
def naming_full_disk(out: PathLike, place: str = "choose another output file") -> Iterator[None]:
    """Let what cannot be written within this context end in an error that says where, and why.

    Args:
        out: what is written.
        place: what to do if no space can be freed.

    Raises:
        OutputError: the system refused, whatever the writer made of it.
    """
    try:
        yield
    except SpectralFairseqError:
        raise
    except Exception as error:  # the error of safetensors has no other class
        reason = _refusal_of_system(error)
        if reason is None:
            raise
        remedy = f"Free some space, or {place}."
        raise OutputError(f"{out} to be written", reason, remedy) from error


def _refusal_of_system(error: Exception) -> Optional[str]:
    # torch fails with an error of its own while it handles that of the system.
    cause = error.__context__ if isinstance(error, RuntimeError) else error
    if isinstance(cause, OSError):
        return str(cause)
    if "unexpected pos" in str(error):  # what torch's writer says of a full disk
        return "no space left on its disk"
    return str(error) if "(os error " in str(error) else None  # of safetensors
