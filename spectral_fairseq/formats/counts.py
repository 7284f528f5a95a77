"""How often each word of a table occurs, from a file or from Python.

A file has lines "<word> <count>", or one count a line in the order of the rows; or it is JSON, an
object word -> count or a list; or a file of numpy with one count for each row.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

from spectral_fairseq.checkpoints.dictionary import MAX_COUNT, WordList, other_line
from spectral_fairseq.errors import DataError, check_count, check_enough, check_type, plainly
from spectral_fairseq.files import check_file, read_json, read_text
from spectral_fairseq.formats import numpy_arrays

Counts = Union[Mapping[str, float], Sequence[float]]


def read_counts(path: Path) -> Counts:
    """Counts by word or by row.

    Raises:
        DataError: missing, or of no form that is known.
    """
    check_file(path, "word counts", "Check the path.")
    if path.suffix in (".npy", ".npz"):
        arrays = list(numpy_arrays.read(path).tensors.values())
        what, remedy = f"array of counts in {path}", "Save it alone with np.save."
        check_count(len(arrays), 1, what, remedy, DataError)
        return list(arrays[0].reshape(-1).tolist())
    if path.suffix == ".json":
        counts = read_json(path, "word counts")
        what = f"counts by word or by row in {path}"
        check_type(counts, (dict, list), what, "Write a list or an object.", DataError)
        return counts
    return _from_lines(path)


def _from_lines(path: Path) -> Counts:
    # Other blanks than these may be words, or end them.
    lines = [line.rstrip(" \t\r") for line in read_text(path).split("\n")]
    by_word: Dict[str, float] = {}
    by_row: List[float] = []
    for number, line in enumerate(lines, 1):
        word, *rest = re.split(r"[ \t]+(?=[^ \t]*$)", line, maxsplit=1)
        parts = [word, *rest] if word and rest else [rest[0] if rest else word]
        if parts == [""]:
            continue
        try:
            count = math.nan if "_" in parts[-1] else float(parts[-1])  # 1_0 is Python's
        except ValueError:
            count = math.nan
        if math.isnan(count) or (by_row if len(parts) == 2 else by_word):
            raise other_line("'<word> <count>', or one count a line,", path, line, number)
        if len(parts) == 2:
            by_word[parts[0]] = by_word.get(parts[0], 0) + count
        else:
            by_row.append(count)
    return by_word or by_row


def with_counts(
    words: Optional[WordList],
    given: Union[str, os.PathLike[str], Counts],
    rows: int,
    uncounted: Sequence[int] = (),
) -> WordList:
    """The words with these counts; a word that is not counted has 0.

    Args:
        words: of the table, as far as they are known.
        given: value of ``--counts``.
        rows: of the table.
        uncounted: rows that stand for no word, where the words are not known.

    Raises:
        DataError: they do not belong to the table, or are no counts.
    """
    if isinstance(given, (str, os.PathLike)):
        counts, source = read_counts(Path(given)), str(given)
    else:
        counts, source = given, "the given counts"
    if isinstance(counts, Mapping):
        if words is None:
            raise DataError(
                f"the words of the table, to which {source} gives counts",
                "a model without a vocabulary",
                "Name its dictionary or tokenizer with --dict, or give one count for each row.",
            )
        values = [counts.get(symbol, 0) for symbol in words.symbols]
        what = f"count of a word of {words.path} in {source}"
        remedy = "Spell words as the vocabulary does, with its marks of subwords."
        check_enough(sum(map(bool, values)), 1, what, remedy)
    else:
        # Arrays and tensors have numbers of their own kinds.
        values = counts.tolist() if hasattr(counts, "tolist") else list(counts)
        left_out = {*(uncounted if words is None else words.uncounted_rows())}
        last = next((row for row in range(rows - 1, -1, -1) if row not in left_out), -1)
        if not last < len(values) <= rows:
            there = str(len(values))
            raise DataError(f"a count for each of {rows} rows in {source}", there, "Count all.")
        values += [0] * (rows - len(values))
    if words is None:  # here, where there are as many counts: a file may declare any number of rows
        words = WordList(None, [f"row {row}" for row in range(rows)], [], list(uncounted))
    wrong = next((value for value in values if not _is_count(value)), None)
    if wrong is not None:
        raise DataError(
            f"whole numbers from 0 to {MAX_COUNT} as counts in {source}",
            plainly(wrong)[:60],
            "Multiply relative frequencies by the number of words of the text.",
        )
    counted = [int(value) for value in values]
    return replace(words, counts=counted, no_words=words.uncounted_rows())


def _is_count(value: Any) -> bool:
    real = isinstance(value, Real) and not isinstance(value, bool)  # those of numpy among them
    return real and bool(0 <= value <= MAX_COUNT and value == int(value))
