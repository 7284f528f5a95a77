"""numpy's .npy and .npz files, mapped; arrays of objects are refused, since they are pickles."""

from __future__ import annotations

import math
import os
import struct
import zipfile
from pathlib import Path
from typing import Any, Dict, NamedTuple, Tuple

import numpy as np
import torch
from torch import Tensor

from spectral_fairseq.checkpoints import archive
from spectral_fairseq.checkpoints.reading import READ_FAILURES, first_line
from spectral_fairseq.checkpoints.tables import Unread
from spectral_fairseq.errors import CheckpointError, DataError

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., lengths of the name and of the rest


def read_npy(path: Path) -> Dict[str, Tensor]:
    """The array, under the name ``array``.

    Args:
        path: a .npy file.

    Raises:
        CheckpointError: damaged, or shorter than it says.
        DataError: objects, or numbers of a type that torch does not have.
    """
    try:
        with open(path, "rb") as file:
            header = _header(file, os.path.getsize(path), path.name)
            if header.dtype.hasobject:
                raise DataError(
                    f"numbers in {path}",
                    "Python objects, which are never read",
                    "Save the table as float32.",
                )
            array = header.mapped(path, file.tell())
    except DataError:
        raise
    except READ_FAILURES as error:
        raise _damaged(path, error) from error
    return {"array": tensor_of(array, path)}


def read_npz(path: Path) -> Tuple[Dict[str, Tensor], Dict[str, Unread]]:
    """Matrices and vectors by their names, and those that cannot be read; others are left out.

    Args:
        path: a .npz file, as ``np.savez`` and ``np.savez_compressed`` write it.

    Raises:
        CheckpointError: damaged, or with arrays that its members cannot hold.
    """
    try:
        archive.check_sizes(archive.entries(path), path)
        with zipfile.ZipFile(path) as opened:
            found = {
                info.filename[: -len(".npy")]: _member(opened, info, path)
                for info in opened.infolist()
                if info.filename.endswith(".npy")
            }
    except CheckpointError:
        raise
    except READ_FAILURES as error:
        raise _damaged(path, error) from error
    tensors: Dict[str, Tensor] = {}
    unread: Dict[str, Unread] = {}
    for name, array in found.items():
        if isinstance(array, Unread):
            unread[name] = array
        elif array is not None:
            try:
                tensors[name] = tensor_of(array, path)
            except DataError:
                unread[name] = _unread(array.shape, array.dtype)
    return tensors, unread


def _unread(shape: Tuple[int, ...], dtype: np.dtype) -> Unread:
    what = "Python objects, which are never read" if dtype.hasobject else f"numbers of {dtype.str}"
    return Unread(shape, f"{what}; save it as float32")


class _Header(NamedTuple):
    """What is known of an array before its numbers are read.

    Attributes:
        shape: of the array.
        order: ``F`` where its columns are stored one after the other, otherwise ``C``.
        dtype: of its numbers.
        size: their bytes.
    """

    shape: Tuple[int, ...]
    order: Any
    dtype: np.dtype
    size: int

    def mapped(self, path: Path, offset: int) -> np.ndarray:
        # Mode c: torch does not know read-only memory, and changes stay out of the file.
        return np.memmap(path, self.dtype, "c", offset, self.shape, self.order)


def _header(file: Any, stored: int, name: str) -> _Header:
    """Read the header of an array of which ``stored`` bytes are there in all.

    Raises:
        ValueError: a version that is not known, or more numbers than the bytes can be.
    """
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"{name} is of version {version} of the format, which is not supported")
    shape, fortran, dtype = readers[version](file)
    size = dtype.itemsize * math.prod(shape)
    if any(n < 0 for n in shape) or (file.tell() + size > stored and not dtype.hasobject):
        sizes = " x ".join(map(str, shape))
        raise ValueError(f"{name} declares {sizes} numbers of {dtype} in {stored:,} bytes")
    return _Header(shape, "F" if fortran else "C", dtype, size)


def _member(opened: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> Any:
    """A matrix or vector, mapped if it is not compressed; None for text and other dimensions."""
    with opened.open(info) as member:
        header = _header(member, info.file_size, info.filename)
        if len(header.shape) not in (1, 2) or header.dtype.kind in "US":
            return None
        if header.dtype.kind not in "fiu":
            return _unread(header.shape, header.dtype)
        if info.compress_type == zipfile.ZIP_STORED:
            return header.mapped(path, _start_of(path, info) + member.tell())
        numbers = np.frombuffer(bytearray(member.read(header.size)), header.dtype)
        return numbers.reshape(header.shape, order=header.order)


def _start_of(path: Path, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a member start in the archive."""
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        signature, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if signature != b"PK\x03\x04":
        raise zipfile.BadZipFile("a member without a header")
    return info.header_offset + _LOCAL_HEADER.size + name + extra


def tensor_of(array: np.ndarray, name: Any) -> Tensor:
    """The tensor that shares an array's memory.

    Args:
        array: of numbers.
        name: of the file or of the array, for the error.

    Raises:
        DataError: torch does not have such numbers.
    """
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"numbers that torch has, in the byte order of this machine, in {name}",
            f"{array.dtype.str}",
            "Save or pass the array as float32, for example.",
        ) from error


def _damaged(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"a whole .npy or .npz file of numbers at {path}",
        first_line(error),
        "Copy it again, or save the table alone with np.save.",
    )
