"""A checkpoint's zip archive: whether its sizes can be true, and its bytes are those written."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import List

from spectral_fairseq.errors import CheckpointError

# Weights hardly shrink when they are compressed; a longer file than this is a trap.
MAX_INFLATION = 20
# What zipfile raises for entries that cannot be read, besides saying that they are bad.
_DAMAGES = (EOFError, RuntimeError, ValueError, struct.error, zlib.error)


def entries(file: Path) -> List[zipfile.ZipInfo]:
    """The entries of a zip archive; none if the file is of torch's older format.

    Raises:
        zipfile.BadZipFile: the archive is damaged.
    """
    if not zipfile.is_zipfile(file):
        return []
    with zipfile.ZipFile(file) as archive:
        return archive.infolist()


def check_sizes(found: List[zipfile.ZipInfo], file: Path) -> int:
    """Refuse an archive that would become much larger than its file.

    Args:
        found: of :func:`entries`.
        file: the checkpoint.

    Returns:
        The bytes that the checkpoint's tensors can have in all.

    Raises:
        CheckpointError: the entries declare more bytes than such a file can hold.
    """
    size = os.path.getsize(file)
    if not found:
        return size
    packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in found)
    declared = sum(entry.file_size for entry in found)
    if declared > size * (MAX_INFLATION if packed else 1):
        raise CheckpointError(
            f"entries that fit into the {size:,} bytes of {file}",
            f"a zip archive that declares {declared:,} bytes",
            "Do not use this file unless you know who made it; fairseq does not compress "
            "checkpoints.",
        )
    return declared


def check_sums(found: List[zipfile.ZipInfo], file: Path) -> None:
    """Compare the bytes of an archive with its checksums, which torch does not do.

    The whole file is read once, at about the speed of its disk.

    Args:
        found: of :func:`entries`.
        file: the checkpoint.

    Raises:
        CheckpointError: an entry is not what was written.
    """
    if not found:
        return
    with zipfile.ZipFile(file) as archive:
        try:
            damaged = archive.testzip()
            what = f"other bytes in its entry {damaged!r} than were written, by their checksum"
        except _DAMAGES as error:
            damaged = what = f"{type(error).__name__}: {error}"
    if damaged is not None:
        raise CheckpointError(
            f"an intact checkpoint in {file}",
            what,
            "Copy it again, or use another one from the same run. If torch was told to write no "
            "checksums, see `verify`.",
        )
