"""The two files of a binarised split: whether their sizes, offsets and word indices can be true.

``fairseq-preprocess`` writes the tokens of a split into PREFIX.bin, and where each sentence
begins into PREFIX.idx. fairseq believes what they say, so that a file that was cut short or
belongs to another dictionary ends in a traceback from numpy or torch, often hours later, or in
wrong figures.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple, Optional

import numpy as np

from spectral_fairseq.errors import DataError, MissingDataError, check_enough
from spectral_fairseq.files import check_file

# First bytes of the formats: --dataset-impl mmap, the older "lazy" and "cached", and "huffman".
_MAPPED, _OLDER, _HUFFMAN = b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00", b"HUFFIDX\x00\x00"
_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2", 9: "u4", 10: "u8"}
_BLOCK = 2**22  # indices that are looked at together

_AGAIN = "Copy both files again, or make them again with fairseq-preprocess."


class IndexFile(NamedTuple):
    """What a .idx file says.

    Attributes:
        dtype: of the word indices in the .bin file.
        first: what is stored for word 0.
        begins: where each sentence begins, in bytes of the .bin file.
        ends: where each sentence ends.
    """

    dtype: np.dtype
    first: int
    begins: np.ndarray
    ends: np.ndarray


def check_indexed_files(prefix: str, words: Optional[int]) -> None:
    """Refuse a split that cannot be what ``fairseq-preprocess`` wrote.

    Reads both files once, as fairseq does when it opens them. Another format than that of two
    files, and a split that does not exist, are left to fairseq.

    Args:
        prefix: path of the two files without .idx and .bin.
        words: size of the dictionary; None if there is none.

    Raises:
        MissingDataError: there is one file without the other.
        DataError: a file is cut, of another format or no regular file, sentences lie outside of
            the .bin file, or a token is not in the dictionary.
    """
    paths = [f"{prefix}.idx", f"{prefix}.bin"]
    missing = [path for path in paths if not os.path.exists(path)]
    if len(missing) == 2:
        return
    if missing:
        raise MissingDataError(f"both files of the split {prefix}", f"no {missing[0]}", _AGAIN)
    for path in paths:
        check_file(path, "a regular file", _AGAIN, DataError)
    index = _read(paths[0])
    if index is None:  # a format without word indices
        return
    size = os.path.getsize(paths[1])
    count = len(index.ends)
    check_enough(count, 1, f"sentence in {paths[0]}", "Check the text that it was made from.")
    if index.begins.min() < 0 or (index.ends < index.begins).any() or index.ends.max() > size:
        raise DataError(
            f"sentences within the {size:,} bytes of {paths[1]}, as {paths[0]} describes them",
            f"one that ends at byte {int(index.ends.max()):,}, or of negative length or place",
            _AGAIN,
        )
    if words is not None:
        _check_tokens(paths[1], index, words)


def _read(path: str) -> Optional[IndexFile]:
    """The content of a .idx file; None if it is of fairseq's Huffman format."""
    with open(path, "rb") as file:
        start = file.read(len(_MAPPED))
    try:
        if start == _MAPPED:
            return _read_mapped(np.memmap(path, mode="r"))
        if start.startswith(_OLDER):
            return _read_older(np.memmap(path, mode="r"))
        if start == _HUFFMAN:
            return None
        raise ValueError(f"the first bytes {start!r}")
    except (KeyError, ValueError, struct.error) as error:
        found = f"{os.path.getsize(path):,} bytes with a wrong header or length ({error})"
        raise DataError(f"an index of fairseq-preprocess at {path}", found, _AGAIN) from error


def _read_mapped(content: np.ndarray) -> IndexFile:
    version, code, count = struct.unpack_from("<QBQ", content.data, len(_MAPPED))
    start = len(_MAPPED) + struct.calcsize("<QBQ")
    if version != 1 or len(content) != start + 12 * count:
        raise ValueError("cut, or another version")
    dtype = np.dtype(_DTYPES[code])
    lengths = np.frombuffer(content, "<i4", count, start).astype(np.int64)
    begins = np.frombuffer(content, "<i8", count, start + 4 * count)
    return IndexFile(dtype, 0, begins, begins + lengths * dtype.itemsize)


def _read_older(content: np.ndarray) -> IndexFile:
    version, code, _, count, dims = struct.unpack_from("<QQQQQ", content.data, len(_OLDER))
    start = len(_OLDER) + struct.calcsize("<QQQQQ")
    if version != 1 or len(content) != start + 8 * (2 * (count + 1) + dims) or dims != count:
        raise ValueError("cut, or another version, or no sequences")
    dtype = np.dtype(_DTYPES[code])
    places = np.frombuffer(content, "<i8", 2 * (count + 1) + dims, start)
    offsets, lengths = places[count + 1 : 2 * count + 2], places[2 * count + 2 :]
    if (places[: count + 1] != np.arange(count + 1)).any() or (np.diff(offsets) != lengths).any():
        raise ValueError("offsets that do not follow from the lengths")
    return IndexFile(dtype, 1, offsets[:-1] * dtype.itemsize, offsets[1:] * dtype.itemsize)


def _check_tokens(path: str, index: IndexFile, words: int) -> None:
    tokens = np.memmap(path, index.dtype, "r") if index.ends.max() else np.zeros(0, index.dtype)
    for start in range(0, len(tokens), _BLOCK):
        block = tokens[start : start + _BLOCK]
        for word in (int(block.min()) - index.first, int(block.max()) - index.first):
            if not 0 <= word < words:
                raise DataError(
                    f"indices of the {words:,} words of the dictionary in {path}",
                    str(word),
                    "Use the dictionary with which the data were made, or make them again with "
                    "it: fairseq-preprocess --srcdict (and --tgtdict).",
                )
