"""The formats in which models and tables are read, one in each file.

A new format is a file with the functions ``recognise`` and ``read`` and an entry of
:data:`FORMATS`, from which the help of the command line, errors and the documentation follow;
``docs/adding_a_format.md`` shows one. Nothing here imports torch, so that the help can list them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Tuple

if TYPE_CHECKING:
    from spectral_fairseq.formats.stored import Stored


@dataclass(frozen=True)
class Format:
    """A format of files.

    Attributes:
        called: what a file of this format is called, with an article.
        module: the module with ``recognise(start: bytes) -> bool``, whether a file with these first
            bytes has the format, and ``read(path: Path) -> Stored``.
        read_as: what is read of it, for the documentation.
        has_neighbours: whether settings and words may stand beside it, as Hugging Face has them.
    """

    called: str
    module: str
    read_as: str
    has_neighbours: bool = False

    def recognise(self, start: bytes) -> bool:
        """Whether a file that starts with these bytes has this format."""
        return bool(importlib.import_module(self.module).recognise(start))

    def read(self, path: Path) -> Stored:
        """What a file of this format holds.

        Raises:
            CheckpointError: it is damaged, or has content that could run code.
            DataError: it has content that cannot be.
        """
        read: Stored = importlib.import_module(self.module).read(path)
        return read


FORMATS: Tuple[Format, ...] = (
    Format(
        "a safetensors file",
        "spectral_fairseq.formats.safetensors_file",
        "the tensors, mapped from the file",
        has_neighbours=True,
    ),
    Format(
        "an array of numpy (.npy, .npz)",
        "spectral_fairseq.formats.numpy_arrays",
        "the only matrix, or the one that `--tensor` names; arrays of objects are never read",
    ),
    Format(
        "a fairseq checkpoint or a state dict of torch",
        "spectral_fairseq.formats.torch_file",
        "a fairseq checkpoint, or all state dicts in the file, such as OpenNMT-py's `model` and "
        "`generator`; copies (moving averages) and optimisers are left out; read with an "
        "[allow-list](../SECURITY.md)",
    ),
    Format(
        "word vectors of word2vec (text or binary), fastText or GloVe",
        "spectral_fairseq.formats.word_vectors",
        "the words and their vectors",
    ),
)
"""The formats of files, in the order in which a file is compared with them."""

FOLDER = "the folder of a Hugging Face model"


def known() -> str:
    """All formats in words, for help and errors."""
    *first, last = [FOLDER, *(form.called for form in FORMATS)]
    return f"{', '.join(first)}, or {last}"
