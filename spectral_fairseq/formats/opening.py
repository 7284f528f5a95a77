"""Opens whatever a path leads to; the format is recognised by the first bytes, not by the name."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Mapping, Tuple, Union

from torch import Tensor

from spectral_fairseq.checkpoints.saved import PART, WEIGHTS, model_path, weights_file
from spectral_fairseq.errors import CheckpointError, ForbiddenError
from spectral_fairseq.formats import FORMATS, Format, known, torch_file
from spectral_fairseq.formats.folder import with_neighbours
from spectral_fairseq.formats.parts import check_no_part
from spectral_fairseq.formats.several import beside, check_one_set, files_of, joined
from spectral_fairseq.formats.stored import Stored

_START_BYTES = 1 << 16


def open_model(path: Union[str, Path]) -> Stored:
    """Open a model or a table in any format that is known.

    Args:
        path: of a file, the index of several, or a model's folder; see :data:`FORMATS`.

    Raises:
        CheckpointError: missing, damaged, or in none of these formats.
        DataError: in one of these formats, with content that cannot be.
        ConfigurationError: a package that reads the format is not installed.
    """
    named = model_path(path)
    in_folder = os.path.isdir(named)
    file = weights_file(named) if in_folder else named
    assert file is not None
    if in_folder:
        check_one_set(file)
    stored, has_neighbours = _read(file, alone=not in_folder)
    if has_neighbours and not stored.checkpoint:
        stored = with_neighbours(stored, file.parent, str(named))
    return replace(stored, name=str(named))


def may_be_torch_file(path: Union[str, Path]) -> bool:
    """Whether a file begins as ``torch.save`` writes it; false for a folder.

    It is true for a file that cannot be read, of which :func:`open_model` says why.
    """
    file = model_path(path)
    if os.path.isdir(file):
        return False
    try:
        with open(file, "rb") as opened:
            return torch_file.recognise(opened.read(4))
    except PermissionError:
        return True


def read_weights(weights: Path) -> Mapping[str, Tensor]:
    """The tensors of one file, or of all that an index names.

    Raises:
        CheckpointError: a file is damaged, or missing.
    """
    stored, _ = _read(weights, alone=False)
    return stored.tensors


def _read(file: Path, alone: bool) -> Tuple[Stored, bool]:
    """The tensors of a file and of those that belong to it; whether settings may be beside them."""
    files = files_of(file, alone)
    forms = [_format_of(one) for one in files.paths]
    read = [form.read(one) for form, one in zip(forms, files.paths)]
    named_so = file.name in WEIGHTS or PART.fullmatch(file.name) is not None
    has_neighbours = named_so or bool(files.weight_map) or forms[0].has_neighbours
    if files.are_several:
        return joined(files, read), has_neighbours
    check_no_part(file)
    # fairseq's own checkpoints have their numbers by epoch and update.
    others = [] if read[0].checkpoint or not alone else beside(file)
    return replace(read[0], beside=others), has_neighbours


def _format_of(file: Path) -> Format:
    try:
        with open(file, "rb") as opened:
            start = opened.read(_START_BYTES)
    except PermissionError as error:
        raise ForbiddenError(f"a readable file at {file}", str(error)) from error
    for form in FORMATS:
        if form.recognise(start):
            return form
    raise CheckpointError(
        f"a model or a table of word vectors at {file}",
        f"a file that starts with {start[:16]!r}" if start else "an empty file",
        f"Known are {known()}. If it is compressed, unpack it first.",
    )
