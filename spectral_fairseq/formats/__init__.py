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
        read_as: what is read of it, for the documentation.
        module: the module with ``recognise(start: bytes) -> bool``, whether a file with these first
            bytes has the format, and ``read(path: Path) -> Stored``; none for folders, whose files
            have formats of their own.
        has_neighbours: whether settings and words may stand beside it, as Hugging Face has them.
    """

    called: str
    read_as: str
    module: str = ""
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
        "the tensors, mapped from the file",
        "spectral_fairseq.formats.safetensors_file",
        has_neighbours=True,
    ),
    Format(
        "an array of numpy (.npy, .npz)",
        "the only matrix, or the one that `--tensor` names; arrays of objects are never read",
        "spectral_fairseq.formats.numpy_arrays",
    ),
    Format(
        "a fairseq checkpoint or a state dict of torch",
        "a fairseq checkpoint, or all state dicts in the file, such as OpenNMT-py's `model` and "
        "`generator`; copies (moving averages) and optimisers are left out; read with an "
        "[allow-list](../SECURITY.md)",
        "spectral_fairseq.formats.torch_file",
    ),
    Format(
        "word vectors of word2vec (text or binary), fastText's .vec or GloVe",
        "the words and their vectors",
        "spectral_fairseq.formats.word_vectors",
    ),
)
"""The formats of files, in the order in which a file is compared with them."""

FOLDER = Format(
    "the folder of a Hugging Face model",
    "`model.safetensors` or `pytorch_model.bin`, also in several files with or without an index, "
    "or `consolidated.safetensors` and `consolidated.00.pth` in the form of Llama; settings from "
    "`config.json` or `params.json`, words from the tokenizer, updates from `trainer_state.json`",
    has_neighbours=True,
)
"""Whose files have one of the formats above."""


def known() -> str:
    """All formats in words, for help and errors."""
    *first, last = [form.called for form in (FOLDER, *FORMATS)]
    return f"{', '.join(first)}, or {last}"
