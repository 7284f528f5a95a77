"""Opens whatever a path leads to; the format is recognised by the first bytes, not by the name."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Dict, Optional, Tuple, Union

from torch import Tensor

from spectral_fairseq.checkpoints import archive
from spectral_fairseq.checkpoints.dictionary import WordList
from spectral_fairseq.checkpoints.formats.folder import open_weights
from spectral_fairseq.checkpoints.formats.numpy_file import read_npy, read_npz
from spectral_fairseq.checkpoints.formats.opened import OpenedModel
from spectral_fairseq.checkpoints.formats.safetensors_file import looks_like_safetensors
from spectral_fairseq.checkpoints.formats.shards import check_declared, joined, parts_of
from spectral_fairseq.checkpoints.formats.torch_file import PICKLE, TORCH_STARTS, ZIP, open_torch
from spectral_fairseq.checkpoints.formats.word_vectors import (
    looks_like_word_vectors,
    read_word_vectors,
)
from spectral_fairseq.checkpoints.reading import READ_FAILURES
from spectral_fairseq.checkpoints.saved import PART, WEIGHTS, model_path, weights_file
from spectral_fairseq.checkpoints.tables import Unread
from spectral_fairseq.errors import CheckpointError

_NPY = b"\x93NUMPY"
_START_BYTES = 1 << 16


def may_be_torch_file(path: Union[str, Path]) -> bool:
    """Whether a file begins as ``torch.save`` writes it; false for a folder.

    It is true for a file that cannot be read, of which :func:`open_model` says why.
    """
    file = model_path(path)
    if os.path.isdir(file):
        return False
    try:
        with open(file, "rb") as opened:
            return opened.read(4).startswith(TORCH_STARTS)
    except PermissionError:
        return True


def open_model(path: Union[str, Path]) -> OpenedModel:
    """Open a model or a table in any format that is known.

    Args:
        path: a fairseq checkpoint, a state dict of torch, a safetensors file, the index of several
            files, a model's folder, .npy, .npz, or word vectors of word2vec, fastText or GloVe.

    Raises:
        CheckpointError: missing, damaged, or none of these.
        DataError: of one of these formats, with content that cannot be.
        ConfigurationError: a package that reads the format is not installed.
    """
    named = model_path(path)
    file = weights_file(named) if os.path.isdir(named) else named
    assert file is not None
    files = parts_of(file)
    opened = [_open(one, named) for one in files]
    model = opened[files.index(file)]
    check_declared(file, files, model.declared_parts)
    if len(files) == 1:
        return model
    tensors, unread, places = joined(files, [one.tensors for one in opened])
    for one in opened:
        unread.update(one.unread)
    return replace(
        model,
        tensors=tensors,
        unread=unread,
        files=places,
        remark=f"Read from {len(files)} files, {files[0].name} and those that belong to it.",
    )


def _open(file: Path, named: Path) -> OpenedModel:
    """Open one file of the model that was named."""
    try:
        with open(file, "rb") as opened:
            start = opened.read(_START_BYTES)
    except PermissionError as error:
        raise CheckpointError(
            f"a readable file at {file}", str(error), "Check the file's permissions."
        ) from error
    of_model = file.name in WEIGHTS or PART.fullmatch(file.name) or file.suffix == ".safetensors"
    if of_model or looks_like_safetensors(start):
        return open_weights(file, named)
    if start.startswith(_NPY):
        return _table(file, read_npy(file))
    if start.startswith(ZIP):
        if _holds_arrays(file):
            return _table(file, *read_npz(file))
        return open_torch(file)
    if start.startswith(PICKLE):
        return open_torch(file)
    if looks_like_word_vectors(start):
        return _vectors(file)
    raise CheckpointError(
        f"a model or a table of word vectors at {file}",
        f"a file that starts with {start[:16]!r}" if start else "an empty file",
        "Known are fairseq checkpoints, state dicts of torch, safetensors, .npy, .npz, word2vec, "
        "GloVe and folders of Hugging Face models. If it is compressed, unpack it first.",
    )


def _holds_arrays(file: Path) -> bool:
    try:
        names = [entry.filename for entry in archive.entries(file)]
    except READ_FAILURES:
        return file.suffix == ".npz"
    return any(name.endswith(".npy") for name in names) or (not names and file.suffix == ".npz")


def _table(
    file: Path, tensors: Dict[str, Tensor], unread: Optional[Dict[str, Unread]] = None
) -> OpenedModel:
    return OpenedModel(str(file), tensors, path=file, weights=file, unread=unread or {})


def _vectors(file: Path) -> OpenedModel:
    symbols, weight = read_word_vectors(file)
    words = WordList(file, symbols, [0] * len(symbols), [])

    def find_words(table: str, rows: int) -> Tuple[Optional[WordList], str]:
        del table, rows
        return words, "stored with the vectors"

    return OpenedModel(
        str(file),
        {"vectors": weight},
        path=file,
        weights=file,
        find_words=find_words,
    )
