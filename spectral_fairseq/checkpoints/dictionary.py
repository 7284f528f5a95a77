"""Read a fairseq dictionary (dict.txt) without fairseq: the words of a table and their counts.

A table has a row for each of <s>, <pad>, </s>, <unk>, then one for each line of the dictionary,
"<symbol> <count> [flags]".
"""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from spectral_fairseq.errors import DataError
from spectral_fairseq.files import why_not_readable

SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
FILLER = "madeupword"
MAX_COUNT = 2**63 - 1  # what a tensor of counts holds
_OVERWRITE = "#fairseq:overwrite"


@dataclass
class WordList:
    """Words and counts of a table's rows.

    Attributes:
        path: the file; None where no file names the words.
        symbols: one for each row.
        counts: one for each row; 0 for the special symbols.
        no_words: rows that stand for no word; those that a dict.txt shows if not given.
    """

    path: Optional[Path]
    symbols: List[str]
    counts: List[int]
    no_words: Optional[List[int]] = None

    def uncounted_rows(self) -> List[int]:
        """Rows that stand for no word: padding, and the ``madeupword`` fillers."""
        if self.no_words is not None:
            return self.no_words
        return [
            row
            for row, symbol in enumerate(self.symbols)
            if symbol == "<pad>" or symbol.startswith(FILLER)
        ]

    def row_of(self, symbol: str) -> Optional[int]:
        """The row of a word; None if it is not in the dictionary."""
        return self.symbols.index(symbol) if symbol in self.symbols else None

    @property
    def has_counts(self) -> bool:
        """Whether any word is counted more than once."""
        return max(self.counts) > 1


def read_dictionary(path: Union[str, Path]) -> WordList:
    """Read dict.txt.

    Args:
        path: the file.

    Raises:
        DataError: missing, not text, empty, or with a line that is not "<symbol> <count>".
    """
    file = Path(path)
    obstacle = why_not_readable(file)
    if obstacle is not None:
        raise DataError(
            f"a dictionary at {file}",
            obstacle,
            "Give dict.txt (or dict.<language>.txt) of the folder made by fairseq-preprocess.",
        )
    try:
        # splitlines() would also split at U+2028 and others, which fairseq treats as symbols.
        lines = file.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"a readable text file in UTF-8 at {file}", str(error), "Write the file again."
        ) from error
    symbols, counts = list(SPECIALS), [0] * len(SPECIALS)
    place = {symbol: row for row, symbol in enumerate(symbols)}
    for number, line in enumerate(lines, 1):
        text = line.rstrip()
        if not text:
            continue
        overwrite = text.endswith(_OVERWRITE)
        if overwrite:
            text = text[: -len(_OVERWRITE)].rstrip()
        symbol, space, count = text.rpartition(" ")
        if not space or not re.fullmatch("[0-9]{1,19}", count) or int(count) > MAX_COUNT:
            raise DataError(
                f"lines '<symbol> <count>' in {file}",
                f"{line[:60]!r} in line {number}",
                "Give the dict.txt that fairseq-preprocess wrote.",
            )
        if symbol in place and not overwrite:
            raise DataError(
                f"every symbol once in {file}",
                f"{symbol!r} again in line {number}",
                "Remove the second line, or end it with #fairseq:overwrite as fairseq asks.",
            )
        place[symbol] = len(symbols)
        symbols.append(symbol)
        counts.append(int(count))
    if len(symbols) == len(SPECIALS):
        raise DataError(
            f"words in the dictionary {file}",
            "an empty dictionary",
            "Give the dict.txt of the training data.",
        )
    return WordList(file, symbols, counts)


def dictionary_files(where: Path, checkpoint: Mapping[str, Any], table: str) -> List[Path]:
    """The dictionaries in a folder of binarised data that could belong to a table.

    Args:
        where: the folder.
        checkpoint: as loaded; its task names the languages.
        table: the table's name; the source language comes first for a table of the encoder.

    Returns:
        Existing files, the most likely one first.
    """
    task = checkpoint_settings(checkpoint, "task")
    # The checkpoint of a training without --source-lang and --target-lang names no languages.
    source, target = _language_pair(where)
    languages = [task.get("target_lang") or target, task.get("source_lang") or source]
    if table.startswith("encoder."):
        languages.reverse()
    names = [f"dict.{language}.txt" for language in languages if language] + ["dict.txt"]
    return [where / name for name in names if os.path.isfile(where / name)]


def _language_pair(where: Path) -> Tuple[Optional[str], Optional[str]]:
    """The one pair of source and target language in file names such as train.de-en.de.idx.

    fairseq also takes the languages from there if no flag gives them. Returns None for both unless
    all files agree.
    """
    try:
        parts = [path.name.split(".") for path in where.iterdir()]
    except PermissionError:  # the files of such a folder can be read, but not listed
        return None, None
    pairs = {part[1] for part in parts if len(part) >= 3 and part[1].count("-") == 1}
    source, _, target = pairs.pop().partition("-") if len(pairs) == 1 else ("", "", "")
    return source or None, target or None


def find_dictionary(
    given: Optional[Union[str, Path]],
    checkpoint: Mapping[str, Any],
    table: str,
    rows: int,
    path: Any,
) -> Tuple[Optional[WordList], str]:
    """The dictionary of a table, if there is one.

    Args:
        given: value of ``--dict``, a file or a folder of binarised data; ``None`` looks for the
            folder that the checkpoint was trained on.
        checkpoint: as loaded.
        table: name of the table.
        rows: number of rows of the table.
        path: of the checkpoint, for messages.

    Returns:
        The dictionary or None, and a sentence that says which one was chosen and why.

    Raises:
        DataError: ``given`` is unusable, or its size is not the table's.
    """
    if given is not None:
        file = Path(given)
        if os.path.isdir(file):
            files = dictionary_files(file, checkpoint, table)
            if not files:
                raise DataError(
                    f"dict.txt or dict.<language>.txt in {file}",
                    "none",
                    "Name the file itself with --dict.",
                )
            words = _fitting(files, rows) or read_dictionary(files[0])
        else:
            words = read_dictionary(file)
        if len(words.symbols) != rows:
            raise DataError(
                f"a dictionary for the {rows} rows of {table} in {path}",
                f"{len(words.symbols)} symbols (the four special ones counted) in {words.path}",
                "Give the dictionary of that checkpoint's training data; for the other side of a "
                "translation model, choose it with --table.",
            )
        return words, "given"
    recorded = str(checkpoint_settings(checkpoint, "task").get("data") or "").split(":")[0]
    folders = _training_folders(recorded, path)
    if not folders:
        return None, (
            f"none given, and the training data are not at {recorded!r}, where the checkpoint says"
            if recorded
            else "none given, and the checkpoint does not say where its data are"
        )
    for folder in folders:
        found = _fitting(dictionary_files(folder, checkpoint, table), rows)
        if found is not None:
            return found, "found in the folder of the training data"
    return None, f"none given, and none of {rows} symbols in the training data's folder"


def _training_folders(recorded: str, path: Any) -> List[Path]:
    """Existing folders that could be the recorded one.

    A relative path is relative to where the training was started. That is usually the present
    working directory or a folder above the checkpoint's.
    """
    if not recorded:
        return []
    above = itertools.islice(Path(path).absolute().parents, 4)
    folders = [Path(recorded), *(parent / recorded for parent in above)]
    return [folder for folder in dict.fromkeys(folders) if os.path.isdir(folder)]


def _fitting(files: Sequence[Path], rows: int) -> Optional[WordList]:
    for file in files:
        words = read_dictionary(file)
        if len(words.symbols) == rows:
            return words
    return None


def checkpoint_settings(checkpoint: Mapping[str, Any], node: str) -> Dict[str, Any]:
    """A node of a checkpoint's configuration as a dict, from ``cfg`` or an old ``args``.

    Args:
        checkpoint: as loaded.
        node: ``task``, ``model``, ...
    """
    cfg = checkpoint.get("cfg")
    found = cfg.get(node) if isinstance(cfg, dict) else None
    if found is None:
        found = checkpoint.get("args") or {}
    if isinstance(found, dict):
        return dict(found)
    return dict(vars(found)) if hasattr(found, "__dict__") else {}
