"""How often each word of a table occurs, from a file or from Python.

A file has lines "<word> <count>", or one count a line in the order of the rows; or it is JSON, an
object word -> count or a list; or a .npy file with one count for each row.
"""

from __future__ import annotations

import math
import re
from numbers import Real
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

from spectral_fairseq.checkpoints.dictionary import MAX_COUNT, WordList
from spectral_fairseq.checkpoints.formats.json_file import read_json
from spectral_fairseq.checkpoints.formats.numpy_file import read_npy
from spectral_fairseq.errors import DataError, MissingDataError
from spectral_fairseq.files import why_not_readable

Counts = Union[Mapping[str, float], Sequence[float]]


def read_counts(path: Path) -> Counts:
    """Counts by word or by row.

    Args:
        path: the file.

    Raises:
        DataError: missing, or of no form that is known.
    """
    obstacle = why_not_readable(path)
    if obstacle is not None:
        raise MissingDataError(f"word counts at {path}", obstacle, "Check the path.")
    if path.suffix == ".npy":
        return list(read_npy(path)["array"].reshape(-1).tolist())
    if path.suffix == ".json":
        found = read_json(path, "word counts")
        if not isinstance(found, (dict, list)):
            raise DataError(f"counts by word or by row in {path}", "neither", "Write a list.")
        return found
    return _from_lines(path)


def _from_lines(path: Path) -> Counts:
    try:
        # Other blanks than these may be words, or end them.
        lines = [line.rstrip(" \t\r") for line in path.read_text("utf-8").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"a readable text file in UTF-8 at {path}", str(error)[:200], "Write the file again."
        ) from error
    by_word: Dict[str, float] = {}
    by_row: List[float] = []
    for number, line in enumerate(lines, 1):
        word, *rest = re.split(r"[ \t]+(?=[^ \t]*$)", line, maxsplit=1)
        parts = [word, *rest] if word and rest else [rest[0] if rest else word]
        if parts == [""]:
            continue
        try:
            count = float(parts[-1])
        except ValueError:
            count = math.nan
        if math.isnan(count) or (by_row if len(parts) == 2 else by_word):
            raise DataError(
                f"lines '<word> <count>', or one count a line, in {path}",
                f"{line[:60]!r} in line {number}",
                "Write all lines alike, the count last.",
            )
        if len(parts) == 2:
            by_word[parts[0]] = by_word.get(parts[0], 0) + count
        else:
            by_row.append(count)
    return by_word or by_row


def with_counts(
    words: Optional[WordList], counts: Counts, rows: int, source: str, uncounted: Sequence[int] = ()
) -> WordList:
    """The words with these counts; a word that is not counted has 0.

    Args:
        words: of the table, None where they are not known.
        counts: by word or by row.
        rows: number of rows of the table.
        source: where the counts are from, for errors.
        uncounted: rows that stand for no word, where the words are not known.

    Raises:
        DataError: they do not belong to the table, or are no counts.
    """
    named = words
    if words is None:
        words = WordList(None, [f"row {row}" for row in range(rows)], [], list(uncounted))
    if isinstance(counts, Mapping):
        if named is None:
            raise DataError(
                f"the words of the table, to which {source} gives counts",
                "a model without a vocabulary",
                "Name its dictionary or tokenizer with --dict, or give one count for each row.",
            )
        found = [counts.get(symbol, 0) for symbol in words.symbols]
        if not any(found):
            raise DataError(
                f"counts of words of {words.path} in {source}",
                f"none of the {len(counts)} words there",
                "Spell words as the vocabulary does, with its marks of subwords.",
            )
    else:
        # Arrays and tensors have numbers of their own kinds.
        found = counts.tolist() if hasattr(counts, "tolist") else list(counts)
        counted = set(range(rows)) - set(words.uncounted_rows())
        if not max(counted, default=-1) < len(found) <= rows:
            raise DataError(
                f"a count for each of {rows} rows in {source}", f"{len(found)}", "Count all rows."
            )
        found += [0] * (rows - len(found))
    wrong = next((one for one in found if not _is_count(one)), None)
    if wrong is not None:
        raise DataError(
            f"whole numbers from 0 to {MAX_COUNT} as counts in {source}",
            repr(wrong)[:60],
            "Multiply relative frequencies by the number of words of the text.",
        )
    return WordList(words.path, words.symbols, [int(one) for one in found], words.uncounted_rows())


def _is_count(value: Any) -> bool:
    real = isinstance(value, Real) and not isinstance(value, bool)  # those of numpy among them
    return real and bool(0 <= value <= MAX_COUNT and value == int(value))
