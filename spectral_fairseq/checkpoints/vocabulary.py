"""The words of a table's rows, from the tokenizer beside a model or from any other file.

A tokenizer.json, a vocab.json (token -> row), a vocab.txt (one token a line), a sentencepiece model
and fairseq's dict.txt are read. Tokens stay as they are spelled there, with their marks of
subwords.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

from spectral_fairseq.checkpoints.dictionary import (
    WordList,
    dictionary_files,
    find_dictionary,
    other_rows,
    read_dictionary,
)
from spectral_fairseq.checkpoints.reading import read_json, read_json_object
from spectral_fairseq.checkpoints.tables import Tables
from spectral_fairseq.errors import (
    ConfigurationError,
    DamagedError,
    DataError,
    MissingDataError,
    check_type,
    first_line,
    needs_extra,
)
from spectral_fairseq.files import check_file, read_text, why_not_readable

# In the order of preference. sentencepiece.bpe.model is missing on purpose: the rows of models that
# come with it (XLM-R, mBART, NLLB) are numbered differently, and only tokenizer.json knows how.
_IN_FOLDERS = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer.model",
    "spm.model",
)
_SENTENCEPIECE = (".model", ".spm")
_KNOWN = "dict.txt, tokenizer.json, vocab.json, vocab.txt or a sentencepiece model"
_OWN = "Give the tokenizer's own vocabulary."
_DICT_LINE = re.compile(r".*\S \d+( #fairseq:overwrite)?\s*")
_PADDING = ("<pad>", "[PAD]")
# Tables are made larger than the vocabulary, to a multiple of 64 for example.
_MOST_FILLERS = 1024


def vocabulary_file(folder: Path, decoder: bool = True) -> Optional[Path]:
    """The file in a model's folder that names the words, or None.

    Marian may have a vocabulary for each side.
    """
    names = (("target_vocab.json",) if decoder else ()) + _IN_FOLDERS
    if os.path.isfile(folder / "target_vocab.json"):
        names = tuple(name for name in names if name != "tokenizer.json")
    return next((folder / name for name in names if os.path.isfile(folder / name)), None)


def read_vocabulary(path: Path) -> WordList:
    """The words in a file of any of these kinds, row by row.

    Raises:
        DataError: missing, or of none of these kinds.
        ConfigurationError: a sentencepiece model, and the package is not installed.
    """
    check_file(path, "a dictionary or tokenizer", f"Give {_KNOWN}.")
    if path.suffix in _SENTENCEPIECE:
        return _from_pieces(path)
    if is_dictionary(path):
        return read_dictionary(path)
    with open(path, "rb") as file:
        is_json = file.read(1) == b"{"
    return _from_json(path) if is_json else _from_lines(path)


def is_dictionary(path: Path) -> bool:
    """Whether a file is a dict.txt; also if it is missing or empty, which its reader explains."""
    if why_not_readable(path) is not None:
        return True
    if path.suffix in _SENTENCEPIECE or path.name == "vocab.txt":
        return False
    with open(path, "rb") as file:
        first = file.readline(4096).decode("utf-8", "replace")
    return not first.strip() or _DICT_LINE.fullmatch(first.rstrip()) is not None


def fitted(words: WordList, rows: int, table: str, model: str) -> WordList:
    """The words that have a row, with fillers for the rows that a table has beyond them.

    Tokens may have been added to a vocabulary for which the model has no rows.

    Raises:
        DataError: far more words than rows, or far fewer.
    """
    fillers = rows - len(words.symbols)
    if abs(fillers) > min(_MOST_FILLERS, rows // 2):
        found = f"{len(words.symbols)} words in {words.path}"
        raise other_rows(rows, f"{table} in {model}", found)
    beyond = range(min(rows, len(words.symbols)), rows)
    return WordList(
        words.path,
        words.symbols[:rows] + [f"row {row}" for row in beyond],
        words.counts[:rows] + [0] * len(beyond),
        [*(row for row in words.uncounted_rows() if row < rows), *beyond],
    )


def words_by_row(path: Path, rows: Mapping[str, Any]) -> WordList:
    """The words of a mapping from token to row; rows without a token stand for no word."""
    most = 2 * len(rows) + _MOST_FILLERS
    wrong = [row for row in rows.values() if not _is_row(row, most)]
    if wrong or not rows:
        found = f"{wrong[0]!r:.40}" if wrong else "no token"
        raise DataError(f"rows 0, 1, 2, ... for the tokens of {path}", found, _OWN)
    symbols: List[Optional[str]] = [None] * (max(rows.values()) + 1)
    for token, row in rows.items():
        symbols[row] = token
    named = [f"row {row}" if symbol is None else symbol for row, symbol in enumerate(symbols)]
    left_out = [row for row, symbol in enumerate(symbols) if symbol is None or symbol in _PADDING]
    return WordList(path, named, [0] * len(named), left_out)


def _is_row(row: Any, most: int) -> bool:
    return isinstance(row, int) and not isinstance(row, bool) and 0 <= row <= most


def _from_json(path: Path) -> WordList:
    content = read_json_object(path, "a tokenizer or vocabulary")
    if not isinstance(content.get("model"), dict):
        rows = {**content, **_added_beside(path)}
        return words_by_row(path, rows)
    vocab = content["model"].get("vocab")
    if isinstance(vocab, list):  # of a unigram model: [[piece, log-probability], ...]
        vocab = {
            str(piece[0]) if isinstance(piece, list) and piece else str(piece): row
            for row, piece in enumerate(vocab)
        }
    check_type(vocab, dict, f"the tokens of a tokenizer, model.vocab, in {path}", _OWN, DataError)
    added = content.get("added_tokens")
    tokens = (
        [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    )
    extra = {str(token.get("content")): token.get("id") for token in tokens}
    return words_by_row(path, {**vocab, **extra})


def _added_beside(path: Path) -> Dict[str, Any]:
    """Tokens that were added to a vocab.json later stand in a file of their own."""
    file = path.with_name("added_tokens.json")
    added = read_json(file, "added tokens") if os.path.isfile(file) else {}
    return added if isinstance(added, dict) else {}


def _from_lines(path: Path) -> WordList:
    tokens = read_text(path).split("\n")
    if tokens and not tokens[-1]:
        tokens.pop()
    rows = {token.rstrip("\r"): row for row, token in enumerate(tokens)}
    return words_by_row(path, rows)


def _from_pieces(path: Path) -> WordList:
    with needs_extra("models", f"to read {path}"):
        import sentencepiece
    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        return words_by_row(path, {model.id_to_piece(row): row for row in range(len(model))})
    except (OSError, RuntimeError) as error:
        raise DamagedError(f"a sentencepiece model at {path}", first_line(error)) from error


def words_of(
    opened: Tables, table: str, rows: int, given: Optional[Union[str, Path]]
) -> Tuple[Optional[WordList], str]:
    """The words of a table, if they are known, and a remark on where they are from.

    Raises:
        DataError: ``given`` is unusable, or does not belong to the table.
        ConfigurationError: the package that reads it is not installed.
    """
    if given is None:
        return opened.find_words(table, rows)
    path = Path(given)
    if opened.checkpoint and (os.path.isdir(path) or is_dictionary(path)):
        return find_dictionary(path, opened.checkpoint, table, rows, opened.name)
    if os.path.isdir(path):
        vocabulary = vocabulary_file(path, "encoder" not in table.split("."))
        files = [vocabulary] if vocabulary is not None else dictionary_files(path, {}, table)
        if not files:
            remedy = f"Give {_KNOWN} with --dict."
            raise MissingDataError(f"a dictionary or a tokenizer in {path}", "none", remedy)
        path = files[0]
    return _fitted_and_remark(path, rows, table, opened.name, "given")


def words_beside(folder: Path, model: str, table: str, rows: int) -> Tuple[Optional[WordList], str]:
    """The words of a table by the file beside a model, as :func:`words_of` returns them."""
    file = vocabulary_file(folder, "encoder" not in table.split("."))
    if file is None:
        return None, "no tokenizer.json, vocab.json, vocab.txt or sentencepiece model beside it"
    try:
        return _fitted_and_remark(file, rows, table, model, "found beside the model")
    except (ConfigurationError, DataError) as error:
        return (
            None,
            f"{file.name} could not be used: it needed {error.expected}, and found {error.found}",
        )


def _fitted_and_remark(
    path: Path, rows: int, table: str, model: str, where: str
) -> Tuple[WordList, str]:
    words = read_vocabulary(path)
    extra = len(words.symbols) - rows
    remark = f"{where}; words without a row: {extra}" if extra > 0 else where
    return fitted(words, rows, table, model), remark
