"""A missing data folder, dictionary or split ends in an error that says what to do.

This patch only changes error messages. It is worth its lines because a wrong data folder is the
first mistake of most users: fairseq answers it with a traceback of ten files and a bare path, and a
malformed dictionary without naming the file. This package's own tools read data through the same
functions, so they give the same errors.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Callable, Tuple

from spectral_fairseq.checkpoints.dictionary import MAX_COUNT
from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.errors import DataError, MissingDataError
from spectral_fairseq.files import why_not_readable

_REMEDY = "Check the path, or make the folder with fairseq-preprocess --destdir."


def explain_folder(infer_language_pair: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``infer_language_pair``, the first to list the data folder.

    Args:
        infer_language_pair: fairseq's function.

    Returns:
        A function of the same signature.
    """

    @functools.wraps(infer_language_pair)
    def infer_or_explain(path: str) -> Tuple[Any, Any]:
        _check_folder(path)
        source, target = infer_language_pair(path)
        if source is None or target is None:
            raise DataError(
                f"files such as train.de-en.de.idx in the data folder {path}",
                "none whose name shows the language pair",
                "Give --source-lang and --target-lang, or make the folder with fairseq-preprocess.",
            )
        return source, target

    return infer_or_explain


def explain_dictionary(add_from_file: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``Dictionary.add_from_file``.

    Args:
        add_from_file: fairseq's method.

    Returns:
        A method of the same signature.
    """

    @functools.wraps(add_from_file)
    def add_or_explain(self: Any, f: Any) -> None:
        if not isinstance(f, str):
            return add_from_file(self, f)
        try:
            obstacle = why_not_readable(f)
            if obstacle is not None and os.path.lexists(f):
                raise DataError(f"a dictionary at {f}", obstacle, _REMEDY)
            add_from_file(self, f)
            _check_counts(self, f)
        except FileNotFoundError as error:
            _check_folder(os.path.dirname(f) or ".")
            raise MissingDataError(
                f"a dictionary at {f}",
                "no such file",
                "Check --source-lang, --target-lang and the data folder; fairseq-preprocess "
                "writes dict.LANG.txt (dict.txt with --only-source).",
            ) from error
        except DataError:
            raise
        except Exception as error:  # fairseq raises this very class for text that is not UTF-8
            if isinstance(error, OSError):
                raise
            raise DataError(
                f"lines of a word and its count in the dictionary {f}",
                " ".join(str(error).split()),  # it may quote a line with its end
                "Make the dictionary again with fairseq-preprocess.",
            ) from error

    return add_or_explain


def _check_counts(dictionary: Any, path: str) -> None:
    for symbol, count in zip(dictionary.symbols, dictionary.count):
        if not 0 <= count <= MAX_COUNT:
            raise DataError(
                f"counts of 0 or more, below 2**63, in the dictionary {path}",
                f"{str(count)[:30]} of {symbol[:60]!r}",
                "Make the dictionary again with fairseq-preprocess.",
            )


def explain_split(load_dataset: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a task's ``load_dataset``.

    Args:
        load_dataset: fairseq's method.

    Returns:
        A method of the same signature.
    """

    @functools.wraps(load_dataset)
    def load_or_explain(self: Any, split: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return load_dataset(self, split, *args, **kwargs)
        except DataError:
            raise
        except FileNotFoundError as error:
            raise MissingDataError(
                f"the split '{split}' in the data folder",
                str(error),
                "Give the name of a split that exists (--train-subset, --valid-subset, "
                "--gen-subset), or prepare it with fairseq-preprocess.",
            ) from error

    return load_or_explain


def _check_folder(path: str) -> None:
    if not os.path.isdir(path):
        found = "a file" if os.path.exists(path) else "no such folder"
        raise MissingDataError(f"a folder of preprocessed data at {path}", found, _REMEDY)


PATCH = Patch(
    name="missing data",
    reason="A missing data folder or dictionary fails with a bare path, and a malformed dictionary "
    "without the name of its file.",
    install=replaces(
        {
            "fairseq.data.data_utils:infer_language_pair": explain_folder,
            "fairseq.data:Dictionary.add_from_file": explain_dictionary,
            "fairseq.tasks.translation:TranslationTask.load_dataset": explain_split,
            "fairseq.tasks.language_modeling:LanguageModelingTask.load_dataset": explain_split,
        }
    ),
)
