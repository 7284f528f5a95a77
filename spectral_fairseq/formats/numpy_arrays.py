"""numpy's .npy and .npz files; arrays of objects are refused, since they are pickles."""

from __future__ import annotations

import math
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
from torch import Tensor

from spectral_fairseq.checkpoints import archive
from spectral_fairseq.checkpoints.reading import READ_FAILURES
from spectral_fairseq.errors import COPY_AGAIN, CheckpointError, DamagedError, DataError, first_line
from spectral_fairseq.formats.state_dicts import tensor_of
from spectral_fairseq.formats.stored import Stored, Unread, find_listed_words

NPY = b"\x93NUMPY"


def recognise(start: bytes) -> bool:
    """Whether a file begins as an array, or as a zip archive whose first entry is one."""
    length = int.from_bytes(start[26:28], "little")
    return start.startswith(NPY) or (
        start.startswith(archive.ZIP) and start[30 : 30 + length].endswith(b".npy")
    )


def read(path: Path) -> Stored:
    """The arrays of a file.

    Raises:
        CheckpointError: damaged, shorter than it says, or of objects.
        DataError: the only array has numbers of a type that torch does not have.
    """
    with open(path, "rb") as file:
        single = file.read(len(NPY)) == NPY
    if single:
        return Stored(str(path), _array(path), file=path)
    tensors, unread, texts = _archive(path)
    find_words = partial(find_listed_words, texts)
    return Stored(str(path), tensors, unread, path, find_words=find_words)


def _array(path: Path) -> Dict[str, Tensor]:
    """The array, under the name ``array``, mapped from the file.

    Raises:
        CheckpointError: damaged, shorter than it says, or of objects.
        DataError: numbers of a type that torch does not have.
    """
    try:
        # Mode c: torch does not know read-only memory, and changes stay out of the file.
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except READ_FAILURES as error:
        raise _damaged(path, error) from error
    return {"array": tensor_of(array, path)}


def _archive(path: Path) -> Tuple[Dict[str, Tensor], Dict[str, Unread], List[List[str]]]:
    """Matrices and vectors by their names, those that cannot be read, and lists of words.

    Raises:
        CheckpointError: damaged, or with arrays that its members cannot hold.
    """
    try:
        archive.entries(path)
        with zipfile.ZipFile(path) as opened:
            arrays = {
                info.filename.removesuffix(".npy"): _member(opened, info)
                for info in opened.infolist()
                if info.filename.endswith(".npy")
            }
    except CheckpointError:
        raise
    except READ_FAILURES as error:
        raise _damaged(path, error) from error
    if not arrays:
        raise DamagedError(f"a .npz file with arrays at {path}", "none")
    tensors: Dict[str, Tensor] = {}
    unread: Dict[str, Unread] = {}
    texts: List[List[str]] = []
    for name, array in arrays.items():
        if isinstance(array, Unread):
            unread[name] = array
        elif isinstance(array, list):
            texts.append(array)
        elif array is not None:
            try:
                tensors[name] = tensor_of(array, path)
            except DataError:
                unread[name] = _unread(array.shape, array.dtype)
    return tensors, unread, texts


def _unread(shape: Tuple[int, ...], dtype: np.dtype) -> Unread:
    what = "Python objects, which are never read" if dtype.hasobject else f"numbers of {dtype.str}"
    return Unread(shape, f"{what}; save it as float32")


def _member(opened: zipfile.ZipFile, info: zipfile.ZipInfo) -> Any:
    """A matrix or vector, or a list of texts; None for other dimensions."""
    with opened.open(info) as member:
        readers = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        version = np.lib.format.read_magic(member)
        if version not in readers:
            raise ValueError(f"{info.filename} is of version {version}, which is not supported")
        shape, _, dtype = readers[version](member)
        # numpy takes the memory that the header asks for before it reads the numbers.
        size = dtype.itemsize * math.prod(shape)
        if any(n < 0 for n in shape) or member.tell() + size > info.file_size:
            if not dtype.hasobject:
                sizes = " x ".join(map(str, shape))
                raise ValueError(
                    f"{info.filename} declares {sizes} numbers of {dtype} in "
                    f"{info.file_size:,} bytes"
                )
    is_text = dtype.kind in "US"
    if len(shape) not in (1, 2) or (is_text and len(shape) == 2):
        return None
    if dtype.kind not in "fiuUS":
        return _unread(shape, dtype)
    with opened.open(info) as member:
        array = np.lib.format.read_array(member, allow_pickle=False)
    if not is_text:
        return array
    return [one if dtype.kind == "U" else one.decode("utf-8", "replace") for one in array.tolist()]


def _damaged(path: Path, error: BaseException) -> CheckpointError:
    remedy = f"{COPY_AGAIN} Or save the table alone with np.save."
    return DamagedError(f"a .npy or .npz file of numbers at {path}", first_line(error), remedy)
