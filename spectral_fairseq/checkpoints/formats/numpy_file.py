"""numpy's .npy and .npz files, mapped; arrays of objects are refused, since they are pickles."""

from __future__ import annotations

import math
import struct
import zipfile
from pathlib import Path
from typing import Any, Dict, Tuple

import numpy as np
import torch
from torch import Tensor

from spectral_fairseq.checkpoints import archive
from spectral_fairseq.checkpoints.reading import READ_FAILURES, first_line
from spectral_fairseq.errors import CheckpointError, DataError

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., lengths of the name and of the rest


def read_npy(path: Path) -> Dict[str, Tensor]:
    """The array, under the name ``array``.

    Args:
        path: a .npy file.

    Raises:
        CheckpointError: damaged, shorter than it says, or with objects.
        DataError: numbers of a type that torch does not have.
    """
    try:
        # Mode c: torch does not know read-only memory, and changes stay out of the file.
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except READ_FAILURES as error:
        raise _damaged(path, error) from error
    return {"array": _tensor(array, path)}


def read_npz(path: Path) -> Dict[str, Tensor]:
    """The matrices by their names; other arrays are left out, whatever they are.

    Args:
        path: a .npz file, as ``np.savez`` and ``np.savez_compressed`` write it.

    Raises:
        CheckpointError: damaged, or with arrays that its members cannot hold.
        DataError: numbers of a type that torch does not have.
    """
    try:
        archive.check_sizes(archive.entries(path), path)
        with zipfile.ZipFile(path) as opened:
            found = {
                info.filename[: -len(".npy")]: _member(opened, info, path)
                for info in opened.infolist()
                if info.filename.endswith(".npy")
            }
    except READ_FAILURES as error:
        if isinstance(error, (CheckpointError, DataError)):
            raise
        raise _damaged(path, error) from error
    return {name: _tensor(array, path) for name, array in found.items() if array is not None}


def _member(opened: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> Any:
    """A matrix, mapped if it is not compressed; None for an array that is no matrix of numbers."""
    with opened.open(info) as member:
        shape, fortran, dtype = _header(member)
        if len(shape) != 2 or dtype.kind not in "fiu":
            return None
        start, size = member.tell(), dtype.itemsize * math.prod(shape)
        if min(shape) < 0 or start + size > info.file_size:
            raise CheckpointError(
                f"the array {info.filename} of {path} to fit into its {info.file_size:,} bytes",
                f"a header that declares {' x '.join(map(str, shape))} numbers of {dtype}",
                "The file is damaged, or not what it seems: copy it again.",
            )
        order: Any = "F" if fortran else "C"
        if info.compress_type == zipfile.ZIP_STORED:
            offset = _start_of(path, info) + start
            return np.memmap(path, dtype, "c", offset, shape, order)
        return np.frombuffer(bytearray(member.read(size)), dtype).reshape(shape, order=order)


def _header(member: Any) -> Tuple[Tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(member)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(member)
    return np.lib.format.read_array_header_2_0(member)


def _start_of(path: Path, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a member start in the archive."""
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        signature, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if signature != b"PK\x03\x04":
        raise zipfile.BadZipFile("a member without a header")
    return info.header_offset + _LOCAL_HEADER.size + name + extra


def _tensor(array: Any, path: Path) -> Tensor:
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"numbers that torch has, in the byte order of this machine, in {path}",
            f"{array.dtype.str}",
            "Save the array again, as float32 for example.",
        ) from error


def _damaged(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"a whole .npy or .npz file of numbers at {path}",
        first_line(error).replace("allow_pickle=False", "it holds objects"),
        "Copy it again, or save the table alone with np.save.",
    )
