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
from typing import Any, List, Mapping, Optional, Sequence, Tuple, Union

from spectral_fairseq.checkpoints.settings import data_folder_in
from spectral_fairseq.errors import DataError, check_enough, listed
from spectral_fairseq.files import check_file, names_in, read_text
from spectral_fairseq.functional.word_counts import were_counted
from spectral_fairseq.provenance import Noted

SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
FILLER = "madeupword"
_OF_PREPROCESS = "Give dict.txt (or dict.<language>.txt) as fairseq-preprocess wrote it."
MAX_COUNT = 2**63 - 1  # what a tensor of counts holds
_OVERWRITE = "#fairseq:overwrite"
# Tasks that append the mask of their noise, and nothing else.
_MASKING = (
    "denoising",
    "masked_lm",
    "multilingual_masked_lm",
    "sentence_prediction",
    "sentence_ranking",
)


@dataclass
class WordList:
    """Words and counts of a table's rows.

    Attributes:
        path: the file; None where no file names the words.
        symbols: one for each row.
        counts: one for each row; 0 for the special symbols.
        no_words: rows that stand for no word; those that a dict.txt shows if not given.
        noted: the file as it was before it was read; None where the words are part of a model.
    """

    path: Optional[Path]
    symbols: List[str]
    counts: List[int]
    no_words: Optional[List[int]] = None
    noted: Optional[Noted] = None

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
        """Whether the words were counted: equal counts, 1 or 100, only fill a dict.txt."""
        return were_counted(self.counts)


def read_dictionary(
    path: Union[str, Path], specials: Sequence[str] = SPECIALS, text: Optional[str] = None
) -> WordList:
    """Read dict.txt.

    Args:
        path: of the file.
        specials: symbols whose rows come before the first line's.
        text: its content, if that was read before.

    Raises:
        DataError: missing, not text, empty, or with a line that is not "<symbol> <count>".
    """
    file, noted = Path(path), Noted.of(path)
    check_file(file, "a dictionary", _OF_PREPROCESS, DataError)
    # splitlines() would also split at U+2028 and others, which fairseq treats as symbols.
    # A byte-order mark is a part of the first symbol, as it is for fairseq.
    lines = (read_text(file, encoding="utf-8") if text is None else text).split("\n")
    symbols, counts = list(specials), [0] * len(specials)
    place = {symbol: row for row, symbol in enumerate(symbols)}
    for number, line in enumerate(lines, 1):
        entry = line.rstrip()
        if not entry:
            continue
        overwrite = entry.endswith(_OVERWRITE)
        symbol, space, count = entry.removesuffix(_OVERWRITE).rstrip().rpartition(" ")
        # The vocabularies of sentencepiece's BPE have ranks in their place: 0, -1, and so on.
        if not space or not re.fullmatch("-?[0-9]{1,19}", count) or abs(int(count)) > MAX_COUNT:
            raise other_line("'<symbol> <count>'", file, line, number)
        if symbol in place and not overwrite:
            raise DataError(
                f"every symbol once in {file}",
                f"{symbol!r} again in line {number}",
                "Remove the second line, or end it with #fairseq:overwrite as fairseq asks.",
            )
        place[symbol] = len(symbols)
        symbols.append(symbol)
        counts.append(int(count))
    words = len(symbols) - len(specials)
    check_enough(words, 1, f"word in the dictionary {file}", _OF_PREPROCESS)
    return WordList(file, symbols, counts, noted=noted)


def other_line(form: str, file: Path, line: str, number: int) -> DataError:
    """The error for a line of another form than the others."""
    found, remedy = f"{line[:60]!r} in line {number}", "Write all lines alike, the count last."
    return DataError(f"lines {form} in {file}", found, remedy)


def other_rows(rows: int, table: str, found: str) -> DataError:
    """The error for words, of a number and a file that were found, that are not a table's."""
    return DataError(
        f"a dictionary or tokenizer for the {rows} rows of {table}",
        found,
        "Give that of the model's training data with --dict, or choose the other table with "
        "--table.",
    )


def dictionary_files(where: Path, task: Mapping[str, Any], table: str) -> List[Path]:
    """The dictionaries in a folder of binarised data that could belong to a table.

    The most likely one is first; that of the source language for a table of the encoder.

    Args:
        where: the folder.
        task: settings of the training's task; empty if they are not known.
        table: its name.
    """
    # The checkpoint of a training without --source-lang and --target-lang names no languages.
    source, target = _language_pair(where)
    languages = [task.get("target_lang") or target, task.get("source_lang") or source]
    files = [task.get("target_dict"), task.get("source_dict")]
    owner = re.match(r"models\.([^.]+)-([^.]+)\.", table)
    if owner is not None:  # a table of multilingual_translation is that of one pair
        languages = [owner[2], owner[1]]
    if "encoder" in table.split("."):
        languages.reverse()
        files.reverse()
    # A task of several pairs has a dictionary for each language; where a table serves several, they
    # are equal.
    languages += _languages_of_pairs(task)
    files = [task.get("fixed_dictionary"), *files]
    names = [os.path.basename(str(file)) for file in files if file]
    names += [f"dict.{language}.txt" for language in languages if language] + ["dict.txt"]
    return [where / name for name in dict.fromkeys(names) if os.path.isfile(where / name)]


def added_symbols(task: Mapping[str, Any], where: Path) -> List[str]:
    """The symbols that the task of a training appends to the dictionaries that it reads.

    They are languages and the mask of denoising, in the order in which fairseq appends them.
    """
    name = str(task.get("_name"))
    pairs, languages = _languages_of_pairs(task), _listed(task.get("langs"))
    if name in _MASKING:
        return ["<mask>"]
    if name == "translation_from_pretrained_bart":
        return [*(f"[{language}]" for language in languages), "<mask>"]
    if name == "multilingual_denoising":
        marked = (languages or _folders_in(where)) if task.get("add_lang_token") else []
        return [*(f"[{language}]" for language in marked), "<mask>"]
    if name == "multilingual_language_modeling":
        marked = _folders_in(where) if task.get("add_bos_token") else []
        return [f"<{code}>" for code in marked if not languages or code in languages]
    if name == "online_backtranslation":
        return ["<mask>", *(f"__{code}__" for code in _listed(task.get("mono_langs")))]
    if name == "translation_multi_simple_epoch":
        known = languages or _lines_of(task.get("lang_dict"), where) or pairs
        return _of_several_pairs(task, known)
    if task.get("encoder_langtok") is not None or task.get("decoder_langtok"):
        return [f"__{language}__" for language in pairs]
    return []


def _of_several_pairs(task: Mapping[str, Any], languages: Sequence[str]) -> List[str]:
    """Those of translation_multi_simple_epoch."""
    style = "[{}]" if task.get("lang_tok_style") == "mbart" else "__{}__"
    added = []
    for kind in _listed(task.get("langtoks_specs")) or ["main"]:
        ending = next((f"_{mark}" for mark in ("dae", "mined") if kind.endswith(mark)), "")
        added += [style.format(language + ending) for language in languages]
    if style == "[{}]" or "mono_dae" in str(task.get("extra_data")):
        added.append("<mask>")
    return added


def _languages_of_pairs(task: Mapping[str, Any]) -> List[str]:
    pairs = _listed(task.get("lang_pairs"))
    return sorted({language for pair in pairs for language in pair.split("-")})


def _listed(value: Any) -> List[str]:
    """The entries of a setting that is a list, or a text with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    return [str(part) for part in parts if part] if isinstance(parts, (list, tuple)) else []


def _folders_in(where: Path) -> List[str]:
    """The languages of a task that has a folder of data for each."""
    return [name for name in names_in(where) if os.path.isdir(where / name)]


def _lines_of(file: Any, where: Path) -> List[str]:
    """The languages that a file lists, at its place or beside the dictionaries."""
    for path in (Path(str(file)), where / os.path.basename(str(file))) if file else ():
        if os.path.isfile(path):
            with open(path, encoding="utf-8", errors="replace") as lines:
                return list(filter(None, map(str.strip, lines)))
    return []


def _language_pair(where: Path) -> Tuple[Optional[str], Optional[str]]:
    """The one pair of source and target language in file names such as train.de-en.de.idx.

    fairseq also takes the languages from there if no flag gives them. Returns None for both unless
    all files agree.
    """
    parts = [name.split(".") for name in names_in(where)]
    pairs = {part[1] for part in parts if len(part) >= 3 and part[1].count("-") == 1}
    source, _, target = pairs.pop().partition("-") if len(pairs) == 1 else ("", "", "")
    return source or None, target or None


def find_dictionary(
    given: Optional[Union[str, Path]],
    task: Mapping[str, Any],
    table: str,
    rows: int,
    path: Any,
) -> Tuple[Optional[WordList], str]:
    """The dictionary of a table, if there is one.

    Args:
        given: value of ``--dict``, a file or a folder of binarised data; ``None`` looks for the
            folder that the checkpoint was trained on.
        task: settings of the training's task, as ``checkpoint_settings`` gives them.
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
            files = dictionary_files(file, task, table)
            if not files:
                there = listed(sorted(text_file.name for text_file in file.glob("dict.*.txt")))
                wanted = f"dict.txt in {file}, or that of a language in the checkpoint's settings"
                raise DataError(wanted, there, "Name the file itself with --dict.")
        else:
            files = [file]
        words = fitting_dictionary(files, rows, task)
        if words is None:
            words, added = read_dictionary(files[0]), added_symbols(task, files[0].parent)
            sizes = f"{len(words.symbols)} words in {words.path}, {len(added)} appended by its task"
            raise other_rows(rows, f"{table} in {path}", sizes)
        return words, "given"
    recorded = data_folder_in(task)
    folders = _training_folders(recorded, path)
    if not folders:
        return None, (
            f"none given, and the training data are not at {recorded!r}, where the checkpoint says"
            if recorded
            else "none given, and the checkpoint does not say where its data are"
        )
    for folder in folders:
        files = dictionary_files(folder, task, table)
        fitting = fitting_dictionary(files, rows, task)
        if fitting is not None:
            return fitting, "found in the folder of the training data"
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


def fitting_dictionary(
    files: Sequence[Path], rows: int, task: Mapping[str, Any]
) -> Optional[WordList]:
    """The first dictionary of so many rows, with the symbols that the task appends to it."""
    for file in files:
        words = read_dictionary(file)
        added = [
            symbol
            for symbol in dict.fromkeys(added_symbols(task, file.parent))
            if symbol not in words.symbols
        ]
        if len(words.symbols) + len(added) == rows:
            words.symbols += added
            words.counts += [0] * len(added)
        if len(words.symbols) == rows:
            return words
    return None
