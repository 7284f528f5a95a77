"""A checkpoint's zip archive: whether its sizes can be true, and its bytes are those written."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import List

from spectral_fairseq.checkpoints.saved import OF_DISTRIBUTED
from spectral_fairseq.errors import (
    COPY_AGAIN,
    CheckpointError,
    DamagedError,
    UntrustedError,
    listed,
)
from spectral_fairseq.files import is_named_in_utf8

ZIP = b"PK\x03\x04"
"""How a zip archive begins whose first entry begins the file."""

# Weights hardly shrink when they are compressed; a longer file than this is a trap.
MAX_INFLATION = 20
ANOTHER = (
    f"{COPY_AGAIN} Another one of the same run may do: checkpoint_best.pt, checkpoint_last.pt or "
    "one of an earlier epoch."
)
# What zipfile raises for entries that cannot be read, besides saying that they are bad.
_DAMAGES = (EOFError, RuntimeError, ValueError, struct.error, zlib.error)


def entries(file: Path) -> List[zipfile.ZipInfo]:
    """The entries of a zip archive; none for another file, as of torch's older format.

    Raises:
        zipfile.BadZipFile: the archive is damaged.
        CheckpointError: the entries declare more bytes than such a file can hold, or two have one
            name, of which each program takes another.
    """
    if not zipfile.is_zipfile(file):
        return []
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, *_DAMAGES):  # OSError in Python 3.9
        with open(file, "rb") as opened:
            if opened.read(len(ZIP)) == ZIP:
                raise
        return []  # numbers at the end of another file happen to be the bytes that end an archive
    size = os.path.getsize(file)
    packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    declared = sum(member.file_size for member in members)
    if declared > size * (MAX_INFLATION if packed else 1):
        raise UntrustedError(
            f"entries that fit into the {size:,} bytes of {file}",
            f"a zip archive that declares {declared:,} bytes; fairseq compresses no checkpoint",
        )
    names = [member.filename for member in members]
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UntrustedError(
            f"one entry of each name in the archive {file}",
            f"{names.count(twice)} of the name {twice[:80]!r}",
        )
    return members


def check_one_archive(members: List[zipfile.ZipInfo], file: Path) -> None:
    """Refuse a zip archive of which programs read different parts, or that holds no checkpoint.

    Raises:
        CheckpointError: it does not begin at the first byte, as where several archives follow each
            other in one file; or torch.save did not write it.
    """
    if not members:
        return
    in_front = min(member.header_offset for member in members)
    if in_front > 0 or file.suffix == ".distcp":
        raise CheckpointError(
            f"a whole checkpoint, one archive of torch.save, in {file}",
            "several archives, or other bytes in front of one" if in_front else "a part of one",
            OF_DISTRIBUTED,
        )
    names = [member.filename for member in members]
    if not any(name == "data.pkl" or name.endswith("/data.pkl") for name in names):
        raise CheckpointError(
            f"an archive of torch.save, which has an entry data.pkl, in {file}",
            f"a zip archive of {len(names)} other entries: {listed([n[:60] for n in names])}",
            "Unpack it, and name the file in it.",
        )


def can_be_mapped(members: List[zipfile.ZipInfo], file: Path) -> bool:
    """Whether torch maps what is in a file; see ``reading.py``, Note [Mapped, not read]."""
    stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
    return bool(members) and stored and is_named_in_utf8(file)


def check_sums(members: List[zipfile.ZipInfo], file: Path) -> None:
    """Compare the bytes of an archive with its checksums, which torch does not do.

    The whole file is read once, at about the speed of its disk.

    Raises:
        CheckpointError: an entry is not what was written.
    """
    if not members:
        return
    with zipfile.ZipFile(file) as archive:
        try:
            damaged = archive.testzip()
            what = f"other bytes in its entry {damaged!r} than were written, by their checksum"
        except _DAMAGES as error:
            damaged = what = f"{type(error).__name__}: {error}"
    if damaged is not None:
        raise DamagedError(
            f"an intact checkpoint in {file}",
            what,
            f"{ANOTHER} If torch was told to write no checksums, see `verify`.",
        )
