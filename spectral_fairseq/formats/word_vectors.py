"""word2vec's text and binary formats, which fastText's .vec files share, and GloVe's text.

word2vec begins with a line "N d". Its text has one line "<word> <d numbers>" a word. The binary
form has the word, a space, d float32 numbers, and often a line break. GloVe is the text without the
first line, and pandas writes one that numbers the columns. A word may contain spaces, so the
numbers are taken from the end of the line. Spaces, tabs and line feeds separate, as for word2vec
and GloVe; other blanks, such as a form feed or a no-break space, are parts of words. Where each
line of a text has more numbers than the first line says, those are no words that end in a number.
Memory is taken for what the file can hold, whatever its first line declares.
"""

from __future__ import annotations

import codecs
import mmap
import os
import re
from pathlib import Path
from typing import IO, List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from spectral_fairseq.checkpoints.dictionary import WordList
from spectral_fairseq.errors import DamagedError, DataError
from spectral_fairseq.formats.stored import Stored

_LONGEST_LINE = 1 << 20
_LONGEST_WORD = 1 << 12
_MOST_DIMENSIONS = 1 << 16
# Fewer numbers that rise by one may be a vector.
_FEWEST_COLUMNS = 4
_WHOLE = re.compile(r"[-+]?\d+", re.ASCII)
_NUMBER = re.compile(r"[-+]?((\d+\.?\d*|\.\d+)(e[-+]?\d+)?|nan|inf)", re.ASCII | re.IGNORECASE)
# bytes.split() also takes these for separators.
_PARTS_OF_WORDS = bytes.maketrans(b"\x0b\x0c\r", b"\0\0\0")


def recognise(start: bytes) -> bool:
    """Whether a file that starts with these bytes is word2vec, or text with vectors."""
    line = start.removeprefix(codecs.BOM_UTF8).split(b"\n", 1)[0]
    return _declared(line) is not None or _vector_length(line) >= 2


def read(path: Path) -> Stored:
    """The vectors, and their words.

    Raises:
        DataError: the file is not what its first line declares, or a line has no vector.
    """
    symbols, weight = _words_and_vectors(path)
    words = WordList(path, symbols, [0] * len(symbols), [])
    return Stored(
        str(path),
        {"vectors": weight},
        file=path,
        find_words=lambda *_: (words, "stored with the vectors"),
    )


def _words_and_vectors(path: Path) -> Tuple[List[str], Tensor]:
    """The words and their vectors, shape (N, d), float32.

    Raises:
        DataError: the file is not what its first line declares, or a line has no vector.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        begin = file.seek(len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0)
        line = file.readline(_LONGEST_LINE)
        declared = _declared(line)
        if declared is None:
            dim = _vector_length(line)
            before = int(_numbers_columns(line, dim))
            if not before:
                file.seek(begin)
            return _text(file, path, dim, size, None, before=before)
        count, dim = declared
        start = file.tell()
        first = file.readline(_LONGEST_LINE)
        file.seek(start)
        numbers = _vector_length(first)
        text = numbers >= dim > 0
        if 1 < numbers < dim:
            raise _other_length(path, dim, str(numbers))
        # A word takes two bytes or more, a number of text as many, and one of the binary form four.
        least = count * (2 * dim + 1 if text else 4 * dim + 2)
        if least > size - start or not 0 < dim <= _MOST_DIMENSIONS or count < 1:
            raise DamagedError(
                f"{count:,} vectors of {dim:,} numbers in {path}, as its first line declares",
                f"{size:,} bytes, which cannot hold them",
            )
        if text:
            return _text(file, path, dim, size - start, count, before=1)
        return _binary(file, path, count, dim)


def _declared(line: bytes) -> Optional[Tuple[int, int]]:
    """N and d of a first line "N d"; None for another line."""
    parts = line.split()
    if len(parts) != 2 or not all(part.isdigit() and len(part) < 19 for part in parts):
        return None
    return int(parts[0]), int(parts[1])


def _vector_length(line: bytes) -> int:
    """How many numbers follow the word, at most; 0 where the line is not text and numbers."""
    # Bytes, not characters: a word may be a blank of Unicode, or of another encoding.
    parts = re.split(rb"[ \t]+", line.strip(b"\r\n").rstrip(b" \t"))
    numbers = 0
    for part in reversed(parts[1:]):
        try:
            float(part)
        except ValueError:
            break
        numbers += 1
    return numbers


def _numbers_columns(line: bytes, dim: int) -> bool:
    """Whether a first line is no vector but numbers the columns, as pandas writes it."""
    counts = ([b"%d" % (first + column) for column in range(dim)] for first in (0, 1))
    return dim >= _FEWEST_COLUMNS and line.split()[-dim:] in counts


def _other_length(path: Path, dim: int, found: str) -> DataError:
    return DataError(
        f"{dim:,} numbers in each line of {path}, as its first line declares",
        found,
        "Correct the first line, or take the file that the program wrote.",
    )


def _text(
    file: IO[bytes], path: Path, dim: int, size: int, count: Optional[int], before: int
) -> Tuple[List[str], Tensor]:
    """The words and vectors of the lines that are left; ``before`` lines have been read."""
    most = count
    if most is None:
        begin = file.tell()
        ends = sum(block.count(b"\n") for block in iter(lambda: file.read(_LONGEST_LINE), b""))
        file.seek(begin)
        most = min(ends, size // (2 * dim + 1)) + 1  # not what many empty lines would take
    table = np.empty((most, dim), dtype=np.float32)
    words: List[str] = []
    more = count is not None  # whether all lines have more numbers than that
    while True:
        line = file.readline(_LONGEST_LINE)
        if not line or not (line.strip() or file.read(_LONGEST_LINE).strip()):
            break  # blank lines may follow the last vector
        word, *numbers = _word_and_numbers(line, dim)
        more = more and _vector_length(line) > dim
        try:
            if len(words) == most or len(numbers) != dim:
                raise ValueError(f"{len(numbers)} numbers, or a line too many")
            table[len(words)] = numbers
        except ValueError:
            at = len(words) + before + 1
            raise DamagedError(
                f"a word and {dim} numbers in line {at} of {path}",
                repr(line[:60].decode("utf-8", "replace")),
            ) from None
        words.append(word.decode("utf-8", "replace"))
    if count is not None and len(words) != count:
        raise DamagedError(
            f"{count:,} vectors in {path}, as its first line says", f"{len(words):,}"
        )
    if more:
        raise _other_length(path, dim, "more in each")
    if count is None and _are_numbers(words):
        raise DataError(
            f"a word in front of each vector in {path}",
            f"numbers alone, such as {words[0][:40]} in the place of the first word",
            "Save a table without words with numpy.save, and read a text as this one with "
            "numpy.loadtxt; or write a word in front of each line.",
        )
    return words, torch.from_numpy(table[: len(words)])


def _are_numbers(words: Sequence[str]) -> bool:
    """Whether the first fields are numbers of a table without words, as numpy.savetxt writes it.

    Whole numbers that are all different are taken for names, such as those of nodes in a graph.
    """
    fields = [word.strip() for word in words]
    if not fields or not all(map(_NUMBER.fullmatch, fields)):
        return False
    return not all(map(_WHOLE.fullmatch, fields)) or len({*fields}) < len(fields)


def _word_and_numbers(line: bytes, dim: int) -> List[bytes]:
    parts = line.rstrip(b" \t\r\n").translate(_PARTS_OF_WORDS).rsplit(None, dim) or [b""]
    if len(parts) == dim and line[:1] in (b" ", b"\t"):  # the word is blank, or empty
        blanks = len(line) - len(line.lstrip(b" \t"))
        return [line[: blanks - 1], *parts]  # the last blank ends the word
    return [line[: len(parts[0])], *parts[1:]]


def _binary(file: IO[bytes], path: Path, count: int, dim: int) -> Tuple[List[str], Tensor]:
    table = np.empty((count, dim), dtype=np.float32)
    words: List[str] = []
    at = file.tell()
    wanted = f"{count:,} words with {dim} float32 numbers each in {path}"
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for row in range(count):
            start, space = at, data.find(b" ", at, at + _LONGEST_WORD)
            at = space + 1 + 4 * dim
            if space < 0 or at > len(data):
                raise DamagedError(wanted, f"none for word {row + 1:,}")
            words.append(data[start:space].decode("utf-8", "replace"))
            table[row] = np.frombuffer(data[space + 1 : at], dtype="<f4")
            at += data[at : at + 1] == b"\n"
        if data[at : at + _LONGEST_WORD].strip():
            raise DamagedError(wanted, f"{len(data) - at:,} bytes more")
    return words, torch.from_numpy(table)
