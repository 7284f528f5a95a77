"""The words of a table's rows, from the tokenizer beside a model or from any other file.

Read are a tokenizer.json, a vocab.json (token -> row, or a list), a vocab.txt (one token a line), a
sentencepiece model or its .vocab, fairseq's dict.txt, and lines with a token and its row, which
Marian, tiktoken, RWKV and Kaldi write: :data:`_FORMS`. Lines of other columns are refused, since
they would pass for tokens. Tokens stay as they are spelled there, with their marks of subwords.
"""

from __future__ import annotations

import ast
import base64
import json
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Pattern,
    Sequence,
    Tuple,
    Union,
)

from spectral_fairseq.checkpoints.dictionary import (
    WordList,
    dictionary_files,
    find_dictionary,
    other_rows,
    read_dictionary,
)
from spectral_fairseq.errors import (
    ConfigurationError,
    DamagedError,
    DataError,
    MissingDataError,
    check_type,
    first_line,
    needs_extra,
)
from spectral_fairseq.files import check_file, read_json, read_text
from spectral_fairseq.formats.stored import Stored
from spectral_fairseq.provenance import Noted

# The models that come with this file (XLM-R, mBART, NLLB) number their rows differently, and only
# tokenizer.json knows how.
_ROWS_OF_THEIR_OWN = "sentencepiece.bpe.model"
# In the order of preference.
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
_PADDING = ("<pad>", "[PAD]")
# Tables are made larger than the vocabulary, to a multiple of 64 for example; those of DeepSeek's
# first models have 102,400 rows for 100,015 tokens.
_MOST_FILLERS = 1024
_ROWS_FOR_A_FILLER = 40

_JSON = re.compile(rb'(\xef\xbb\xbf)?\s*(\{\s*["}]|\[\s*")')
_DICT_LINE = re.compile(r".*\S -?\d+( #fairseq:overwrite)?\s*")
_CODE_LINE = re.compile(r"\S+ \S+ \d+")  # of fastBPE
_SCORED_LINE = re.compile(r"([^\t]*)\t(-?\d+(?:\.\d*)?(?:e[-+]?\d+)?)")
_COLUMNS = re.compile(r"\S+[ \t]+\S|[ \t]+\d+[ \t]+\S|.*[,;:=|]-?\d+(\.\d+)?$|.*\t")
# So many numbers that rise by one are no counts, wherever they begin.
_SURELY_ROWS = 10
# The share of a file's lines that may have several columns although each is one token.
_FEW = 0.1

Row = Tuple[str, Any]
"""A token and its row."""


class _Form(NamedTuple):
    """Lines with a token and its row: as an expression with both names, and how to read a token.

    The rows rise by one, unless ``ordered`` is false, which tells them from counts.
    """

    line: Pattern[str]
    spelled: Callable[[str], str]
    ordered: bool = True


# What a token of another form raises: a word of four letters may be no base64.
_NOT_SPELLED = (ValueError, SyntaxError, MemoryError, RecursionError)


def _unquoted(text: str) -> str:
    """A key of YAML."""
    if text[:1] == "'":
        return text[1:-1].replace("''", "'")
    if text[:1] != '"':
        return text
    return str(json.loads(re.sub(r"\\x([0-9A-Fa-f]{2})", r"\\u00\1", text)))


def _from_base64(text: str) -> str:
    return base64.b64decode(text, validate=True).decode("utf-8", "backslashreplace")


def _from_literal(text: str) -> str:
    value = ast.literal_eval(text)
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


_ROW = r"(?P<row>\d{1,18})"
_FORMS = (
    # Marian's vocab.yml, "</s>": 0
    _Form(
        re.compile(r"""(?P<token>"(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^"'\s].*?):[ ]+""" + _ROW),
        _unquoted,
        ordered=False,
    ),
    _Form(re.compile(r"(?P<token>[A-Za-z0-9+/]+=*) " + _ROW), _from_base64),  # tiktoken
    _Form(re.compile(_ROW + r""" (?P<token>b?(?:'.*'|".*")) \d+"""), _from_literal),  # RWKV
    _Form(re.compile(r"(?P<token>\S+)[ \t]" + _ROW), str),  # Kaldi and icefall
    _Form(re.compile(_ROW + r"[ \t](?P<token>\S+)"), str),
)


def vocabulary_file(folder: Path, table: str) -> Optional[Path]:
    """The file in a model's folder that names the words of a table, or None.

    Marian may have a vocabulary for each side.
    """
    of_encoder = "encoder" in table.split(".")
    names = (() if of_encoder else ("target_vocab.json",)) + _IN_FOLDERS
    if os.path.isfile(folder / "target_vocab.json"):
        names = tuple(name for name in names if name != "tokenizer.json")
    return next((folder / name for name in names if os.path.isfile(folder / name)), None)


def read_vocabulary(path: Path) -> WordList:
    """The words in a file of any of these kinds, row by row.

    Raises:
        DataError: missing, or of none of these kinds.
        ConfigurationError: a sentencepiece model, and the package is not installed.
    """
    return _read(path)[0]


def _read(path: Path, rows: Optional[int] = None) -> Tuple[WordList, Optional[int]]:
    """The words in a file, and of a dict.txt the number of its lines.

    Where a table has so many ``rows``, the lines are words and counts in the order of the rows, as
    word2vec and GloVe write their vocabulary, and fairseq's symbols have none.
    """
    check_file(path, "a dictionary or tokenizer", f"Give {_KNOWN}.")
    noted = Noted.of(path)
    reader, lines = _reader_of(path)
    words = reader(specials=()) if lines is not None and lines == rows else reader()
    return replace(words, noted=noted), lines


def is_dictionary(path: Path) -> bool:
    """Whether a file is a dict.txt; also what is no file or empty, which its reader explains."""
    return not os.path.isfile(path) or _reader_of(path)[1] is not None


def _reader_of(path: Path) -> Tuple[Callable[..., WordList], Optional[int]]:
    """What reads a file, by its name and its content, and of a dict.txt the number of its lines.

    It has what was read and matched here; that of a dict.txt takes ``specials``.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(4096)
    except OSError as why:
        wanted = f"a dictionary or tokenizer that may be read at {path}"
        raise DataError(wanted, str(why), "Check its name and permissions.") from why
    if path.suffix == ".json" or _JSON.match(start):
        return partial(_from_json, path), None
    # Llama 3 has a file of tiktoken under the name of a sentencepiece model.
    if path.suffix in _SENTENCEPIECE and not _FORMS[1].line.match(start.decode("latin-1")):
        return partial(_from_pieces, path), None
    text = read_text(path, encoding="utf-8")
    lines = _lines_of(text)
    numbered = _numbered(lines)
    if numbered is not None:
        return partial(words_by_row, path, numbered), None
    first = next(filter(str.strip, lines), "")
    counted = path.name != "vocab.txt" and _DICT_LINE.fullmatch(first) is not None
    if not first or (counted and not all(map(_CODE_LINE.fullmatch, lines))):
        return partial(read_dictionary, path, text=text), sum(map(bool, map(str.strip, lines)))
    return partial(_from_lines, path, lines), None


def _lines_of(text: str) -> List[str]:
    """The lines of a text; splitlines() would end a line at U+2028 and others too."""
    lines = [line.rstrip("\r") for line in text.removeprefix("\ufeff").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _numbered(lines: Sequence[str]) -> Optional[List[Row]]:
    """The tokens and rows of lines of one of :data:`_FORMS`; None for other lines."""
    lines = [line for line in lines if line.strip()]
    for form in _FORMS:
        begin = [int(match["row"]) for match in map(form.line.fullmatch, lines[:2]) if match]
        if len(begin) < 2 or (form.ordered and begin[1] != begin[0] + 1):
            continue
        found = [match for match in map(form.line.fullmatch, lines) if match]
        rows = [int(match["row"]) for match in found]
        expected = list(range(min(rows), min(rows) + len(lines)))
        surely = min(rows) <= 1 or (form.ordered and len(lines) >= _SURELY_ROWS)
        if not surely or (rows if form.ordered else sorted(rows)) != expected:
            continue
        try:
            tokens = [form.spelled(match["token"]) for match in found]
        except _NOT_SPELLED:
            continue
        # Units of speech are numbers with counts.
        if len(set(tokens)) == len(rows) and not all(map(str.isdigit, tokens)):
            return list(zip(tokens, rows))
    return None


def fitted(words: WordList, rows: int) -> WordList:
    """The words that have a row, with fillers for the rows that a table has beyond them.

    Tokens may have been added to a vocabulary for which the model has no rows.
    """
    beyond = range(min(rows, len(words.symbols)), rows)
    return replace(
        words,
        symbols=words.symbols[:rows] + [f"row {row}" for row in beyond],
        counts=words.counts[:rows] + [0] * len(beyond),
        no_words=[*(row for row in words.uncounted_rows() if row < rows), *beyond],
    )


def _too_different(words: WordList, lines: Optional[int], rows: int) -> str:
    """What was found of words that cannot be those of so many rows; empty of those that can be."""
    count = len(words.symbols)
    # Nothing tells which of fairseq's symbols have rows of their own.
    if lines is not None and count > rows:
        return f"{lines} words in {words.path}, after fairseq's {count - lines} symbols"
    most = max(_MOST_FILLERS, rows // _ROWS_FOR_A_FILLER) if rows > count else _MOST_FILLERS
    return f"{count} words in {words.path}" if abs(rows - count) > min(most, rows // 2) else ""


def words_by_row(path: Path, rows: Iterable[Row]) -> WordList:
    """The words of pairs of token and row; rows without a token stand for no word.

    Raises:
        DataError: no such pair, other numbers than rows, or two tokens in a row.
    """
    pairs = list(rows)
    most = 2 * len(pairs) + _MOST_FILLERS
    wrong = [row for _, row in pairs if not _is_row(row, most)]
    if wrong or not pairs:
        found = f"{wrong[0]!r:.40}" if wrong else "no token"
        raise DataError(f"rows 0, 1, 2, ... for the tokens of {path}", found, _OWN)
    symbols: List[Optional[str]] = [None] * (max(row for _, row in pairs) + 1)
    for token, row in pairs:
        if symbols[row] not in (None, token):
            found = f"{symbols[row]!r:.40} and {token!r:.40} in row {row}"
            raise DataError(f"one token a row in {path}", found, _OWN)
        symbols[row] = token
    named = [f"row {row}" if symbol is None else symbol for row, symbol in enumerate(symbols)]
    left_out = [row for row, symbol in enumerate(symbols) if symbol is None or symbol in _PADDING]
    return WordList(path, named, [0] * len(named), left_out)


def _is_row(row: Any, most: int) -> bool:
    return isinstance(row, int) and not isinstance(row, bool) and 0 <= row <= most


def _from_json(path: Path) -> WordList:
    content = read_json(path, "a tokenizer or vocabulary")
    if isinstance(content, list):  # of CTranslate2
        check_type(next(iter(content), None), str, f"a list of tokens in {path}", _OWN, DataError)
        return words_by_row(path, ((str(token), row) for row, token in enumerate(content)))
    check_type(content, dict, f"a tokenizer or vocabulary in {path}", _OWN, DataError)
    if not isinstance(content.get("model"), dict):
        return words_by_row(path, _with_added(content.items(), _added_beside(path)))
    vocab = content["model"].get("vocab")
    if isinstance(vocab, list):  # of a unigram model: [[piece, log-probability], ...]
        pieces = (piece[0] if isinstance(piece, list) and piece else piece for piece in vocab)
        vocab = {str(piece): row for row, piece in enumerate(pieces)}
    check_type(vocab, dict, f"the tokens of a tokenizer, model.vocab, in {path}", _OWN, DataError)
    added = content.get("added_tokens")
    tokens = added if isinstance(added, list) else []
    extra = [
        (str(token.get("content")), token.get("id")) for token in tokens if isinstance(token, dict)
    ]
    return words_by_row(path, _with_added(vocab.items(), extra))


def _with_added(rows: Iterable[Row], added: Iterable[Row]) -> Iterator[Row]:
    """The tokens of a vocabulary, and those that were added later, which take a token's place."""
    later = dict(added)
    taken = {row for row in later.values() if isinstance(row, int)}
    for token, row in rows:
        if token not in later and not (isinstance(row, int) and row in taken):
            yield token, row
    yield from later.items()


def _added_beside(path: Path) -> Iterator[Row]:
    """Tokens that were added to a vocabulary of transformers later stand in files of their own."""
    added = _object_beside(path, "added_tokens.json")
    yield from added.items()
    settings = _object_beside(path, "tokenizer_config.json")
    decoder = settings.get("added_tokens_decoder")
    for row, token in decoder.items() if isinstance(decoder, dict) else ():
        text = token.get("content") if isinstance(token, dict) else None
        if isinstance(text, str) and str(row).isdigit():
            yield text, int(row)


def _object_beside(path: Path, name: str) -> Dict[str, Any]:
    file = path.with_name(name)
    content = read_json(file, "added tokens") if os.path.isfile(file) else {}
    return content if isinstance(content, dict) else {}


def _from_lines(path: Path, lines: List[str]) -> WordList:
    scored = [_SCORED_LINE.fullmatch(line) for line in lines]
    if all(scored) and any(not match[2].isdigit() for match in scored if match):  # sentencepiece's
        lines = [match[1] for match in scored if match]
    elif sum(map(bool, map(_COLUMNS.match, lines))) > (1 - _FEW) * len(lines):
        found = f"lines of several columns, such as {lines[-1][:60]!r}"
        remedy = "Write one token a line, in the order of the table's rows."
        raise DataError(f"{_KNOWN} at {path}", found, remedy)
    rows = ((token, row) for row, token in enumerate(lines))
    return words_by_row(path, _with_added(rows, _added_beside(path)))


def _from_pieces(path: Path) -> WordList:
    with needs_extra("models", f"to read {path}"):
        import sentencepiece
    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        pieces = {model.id_to_piece(row): row for row in range(len(model))}
    except (OSError, RuntimeError) as error:
        raise DamagedError(f"a sentencepiece model at {path}", first_line(error)) from error
    added = dict(_added_beside(path))
    if path.name == _ROWS_OF_THEIR_OWN and not added:
        raise DataError(
            f"a tokenizer whose rows are known, for {path}",
            "a sentencepiece model with the name of those of XLM-R, mBART and NLLB, which give "
            "its pieces other rows",
            "Give tokenizer.json, which fast tokenizers save, or dict.txt; if the rows are those "
            "of the pieces, give a copy of the file under another name.",
        )
    for piece, row in added.items():
        if pieces.get(piece, row) != row:
            wanted = f"pieces of {path} in the rows that the files of tokens beside it give"
            found = f"{piece} in row {row} there, and as number {pieces[piece]} in the model"
            raise DataError(wanted, found, "Give tokenizer.json, which fast tokenizers save.")
    return words_by_row(path, _with_added(pieces.items(), added.items()))


def words_of(
    opened: Stored, table: str, rows: int, given: Optional[Union[str, Path]]
) -> Tuple[Optional[WordList], str]:
    """The words of a table, if they are known, and a remark on where they are from.

    Args:
        opened: the model.
        table: its name.
        rows: their number.
        given: value of ``--dict``.

    Raises:
        DataError: ``given`` is unusable, or does not belong to the table.
        ConfigurationError: the package that reads it is not installed.
    """
    if given is None:
        words, remark = opened.find_words(table, rows)
    else:
        words, remark = _given_words(opened, table, rows, Path(given))
    if words is not None:  # what the settings say of padding counts whatever its token is called
        padding = [row for row in opened.uncounted if row < rows]
        words = replace(words, no_words=sorted({*words.uncounted_rows(), *padding}))
    return words, remark


def _given_words(
    opened: Stored, table: str, rows: int, path: Path
) -> Tuple[Optional[WordList], str]:
    """The words in a file or folder that was named, and what they are."""
    if os.path.isdir(path) and not opened.training:
        vocabulary = vocabulary_file(path, table)
        files = [vocabulary] if vocabulary is not None else dictionary_files(path, {}, table)
        if not files:
            remedy = f"Give {_KNOWN} with --dict."
            raise MissingDataError(f"a dictionary or a tokenizer in {path}", "none", remedy)
        path = files[0]
    elif opened.training and is_dictionary(path):
        return find_dictionary(path, opened.training["task"], table, rows, opened.name)
    return _fitted_and_remark(path, rows, table, opened.name, "given")


def words_beside(folder: Path, model: str, table: str, rows: int) -> Tuple[Optional[WordList], str]:
    """The words of a table by the file beside a model, as :func:`words_of` returns them."""
    file = vocabulary_file(folder, table)
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
    words, lines = _read(path, rows)
    if lines == rows:
        return words, f"{where}; a row for each line"
    found = _too_different(words, lines, rows)
    if found:
        raise other_rows(rows, f"{table} in {model}", found)
    extra = len(words.symbols) - rows
    if extra == 1 and words.symbols[0] == "row 0":
        left_out = [row - 1 for row in words.uncounted_rows() if row > 0]
        words = replace(
            words, symbols=words.symbols[1:], counts=words.counts[1:], no_words=left_out
        )
        return words, f"{where}; its rows are counted from 1"
    remark = f"{where}; words without a row: {extra}" if extra > 0 else where
    return fitted(words, rows), remark
