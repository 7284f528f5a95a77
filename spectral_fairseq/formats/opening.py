"""Opens whatever a path leads to; the format is recognised by the first bytes, not by the name."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Union

from spectral_fairseq.checkpoints.reading import lack_of_memory
from spectral_fairseq.checkpoints.saved import PART, WEIGHTS, model_file
from spectral_fairseq.errors import CheckpointError, ForbiddenError
from spectral_fairseq.files import names_in
from spectral_fairseq.formats import FORMATS, Format, known, torch_file
from spectral_fairseq.formats.folder import with_neighbours
from spectral_fairseq.formats.several import files_of, joined
from spectral_fairseq.formats.stored import Stored
from spectral_fairseq.provenance import Noted

_START_BYTES = 1 << 16
_CONVERTED = "It is a GGUF file: take the model from which it was converted."
_COMPRESSED = "It is compressed: unpack it first."
# How files begin that are often given and are in no format above -> what to do.
_NOT_READ = {
    # What stands in the place of a large file in a clone of a repository.
    b"version https://git-lfs": (
        "It stands for a file that Git LFS did not fetch: run git lfs pull in its folder."
    ),
    b"\xba\x16O/": "It is a .bin of fastText: take the .vec file that fastText writes beside it.",
    b"GGUF\2\0\0\0": _CONVERTED,
    b"GGUF\3\0\0\0": _CONVERTED,
    b"\x89HDF\r\n\x1a\n": "It is an HDF5 file: save the model as safetensors.",
    b"\x1f\x8b": _COMPRESSED,
    b"\xfd7zXZ\0": _COMPRESSED,
}


def open_model(path: Union[str, Path]) -> Stored:
    """Open a model or a table in any format that is known.

    Args:
        path: of a file, the index of several, or a model's folder; see :data:`FORMATS`.

    Raises:
        CheckpointError: missing, damaged, or in none of these formats.
        DataError: in one of these formats, with content that cannot be.
        ConfigurationError: a package that reads the format is not installed.
    """
    file = model_file(path)
    there = names_in(file.parent)
    files = files_of(file, there, named=not os.path.isdir(path))
    noted = [Noted.of(one) for one in files.paths]
    forms = [_format_of(one) for one in files.paths]
    read = [_read(form, one) for form, one in zip(forms, files.paths)]
    stored = joined(files, read)
    by_name = file.name in WEIGHTS or PART.fullmatch(file.name) is not None
    has_neighbours = by_name or bool(files.weight_map) or forms[0].has_neighbours
    if has_neighbours and not stored.training:
        stored = with_neighbours(stored, file.parent, str(path))
    return replace(stored, name=str(Path(path)), noted=noted)


def may_be_torch_file(path: Union[str, Path]) -> bool:
    """Whether a file begins as ``torch.save`` writes it; false for a folder.

    It is true for a file that cannot be read, of which :func:`open_model` says why.
    """
    file = model_file(path)
    if os.path.isdir(path):
        return False
    try:
        with open(file, "rb") as opened:
            return torch_file.recognise(opened.read(4))
    except PermissionError:
        return True


def _read(form: Format, file: Path) -> Stored:
    try:
        return form.read(file)
    except (MemoryError, OSError, RuntimeError, CheckpointError) as error:
        # A format may have taken it for damage.
        lacking = lack_of_memory(file, error.__cause__ or error)
        if lacking is None:
            raise
        raise lacking from error


def _format_of(file: Path) -> Format:
    try:
        with open(file, "rb") as opened:
            start = opened.read(_START_BYTES)
    except PermissionError as error:
        raise ForbiddenError(f"a readable file at {file}", str(error)) from error
    # Before the formats: a GGUF file of 123 tensors begins like safetensors.
    remedy = next((advice for begin, advice in _NOT_READ.items() if start.startswith(begin)), "")
    for form in () if remedy else FORMATS:
        if form.recognise(start):
            return form
    raise CheckpointError(
        f"a model or a table of word vectors at {file}",
        f"a file that starts with {start[:16]!r}" if start else "an empty file",
        remedy or f"Known are {known()}. If it is compressed, unpack it first.",
    )
