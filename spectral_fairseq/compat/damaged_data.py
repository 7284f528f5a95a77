"""A damaged split of binarised data is refused before anything is computed from it.

This patch mostly changes error messages. It is worth its lines because a copy that was cut short,
or a dictionary of another run, otherwise fails hours later in the middle of an epoch, if at all:
on a GPU with an assertion that names neither the file nor the token.
"""

from __future__ import annotations

import itertools
import os
import shlex
from typing import Any, Callable

from spectral_fairseq.checkpoints.dictionary import MAX_COUNT
from spectral_fairseq.compat.indexed_files import check_indexed_files
from spectral_fairseq.compat.patching import Patch, replaces, wrapping
from spectral_fairseq.errors import DataError, MissingDataError
from spectral_fairseq.files import check_file

_DICTIONARY_REMEDY = "Check the path, or make the dictionary with fairseq-preprocess."


@wrapping
def check_first(
    path: str,
    dictionary: Any = None,
    dataset_impl: Any = None,
    combine: bool = False,
    *args: Any,
    original: Callable[..., Any],
    **kwargs: Any,
) -> Any:
    """Wrap ``load_indexed_dataset``, through which tasks open their splits."""
    words = None if dictionary is None else len(dictionary)
    for number in itertools.count():
        prefix = f"{path}{number or ''}"
        _check_shell(prefix)
        check_indexed_files(prefix, words)
        if not combine or not os.path.exists(f"{prefix}.idx"):
            break
    return original(path, dictionary, dataset_impl, combine, *args, **kwargs)


def _check_shell(prefix: str) -> None:
    """Refuse FASTA data whose path would run a program in the shell that fairseq reads them with.

    The name of a language, which is a part of the path, comes from the checkpoint.

    Raises:
        DataError: the path has characters that a shell reads.
    """
    path = f"{prefix}.fasta"
    if os.path.exists(path) and shlex.quote(path) != path:
        raise DataError(
            "a path of letters, digits and @%+=:,./-_, as fairseq passes that of FASTA data to a "
            "shell",
            path,
            "Rename the folder or the file.",
        )


@wrapping
def check_dictionary(self: Any, f: Any, *, original: Callable[..., None]) -> None:
    """Wrap ``Dictionary.add_from_file``, which would wait for a pipe and take any count."""
    from fairseq.file_io import PathManager

    if not isinstance(f, str) or PathManager.path_requires_pathmanager(f):  # such as a remote one
        return original(self, f)
    if not os.path.realpath(f).startswith("/proc/"):  # a pipe of the shell, as of <(...)
        kind = DataError if os.path.lexists(f) else MissingDataError
        check_file(f, "a dictionary", _DICTIONARY_REMEDY, kind)
    try:
        original(self, f)
    except OSError:
        raise
    except Exception as error:  # fairseq raises this very class for text that is not UTF-8
        found = " ".join(str(error).split())  # it may quote a line with its end
        wanted = f"lines of a word and its count in {f}"
        raise DataError(wanted, found, _DICTIONARY_REMEDY) from error
    for symbol, count in zip(self.symbols, self.count):
        # Negative ones are allowed: the vocabularies of sentencepiece's BPE have them.
        if not -MAX_COUNT <= count <= MAX_COUNT:
            raise DataError(
                f"counts between -2**63 and 2**63 in the dictionary {f}",
                f"{str(count)[:30]} of {symbol[:60]!r}",
                _DICTIONARY_REMEDY,
            )


DAMAGED_DATA = Patch(
    name="damaged data",
    reason="Binarised data that are cut short, or made with another dictionary, fail in the middle "
    "of training without the name of a file, or give wrong figures.",
    install=replaces(
        {
            "fairseq.data.data_utils:load_indexed_dataset": check_first,
            "fairseq.data:Dictionary.add_from_file": check_dictionary,
        }
    ),
)
