"""What every format is read into: tensors that are read when they are used, and what is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, List, Mapping, Optional, Tuple

from torch import Tensor

from spectral_fairseq.checkpoints.dictionary import WordList
from spectral_fairseq.checkpoints.formats.shards import Shards

WordFinder = Callable[[str, int], Tuple[Optional[WordList], str]]


def _no_words(table: str, rows: int) -> Tuple[Optional[WordList], str]:
    del table, rows
    return None, "none given, and the model stores no words"


@dataclass
class OpenedModel:
    """A model that was opened.

    Attributes:
        name: what it is called in messages, usually its path.
        tensors: name -> tensor, mapped from the file where its format allows that.
        path: the file or folder, as it was named; None for a model in memory.
        weights: the file that holds the tensors, or the index of several.
        default_table: the table to measure where no name is known.
        find_words: (table, number of its rows) -> its words, or None, and a remark on the choice.
        uncounted: rows that stand for no word, where the words are not known.
        arch: name of the architecture, if it is known.
        epoch: epoch of the training, if it is known.
        updates: updates of the training, if they are known.
        checkpoint: a fairseq checkpoint without its model; empty for others.
    """

    name: str
    tensors: Mapping[str, Tensor]
    path: Optional[Path] = None
    weights: Optional[Path] = None
    default_table: Optional[str] = None
    find_words: WordFinder = _no_words
    uncounted: List[int] = field(default_factory=list)
    arch: Optional[str] = None
    epoch: Optional[int] = None
    updates: Optional[int] = None
    checkpoint: Mapping[str, Any] = field(default_factory=dict)

    def file_of(self, table: str) -> Optional[Path]:
        """The file that holds a table; None for a model in memory."""
        return self.tensors.file_of(table) if isinstance(self.tensors, Shards) else self.weights


def padding_rows(settings: Mapping[str, Any]) -> List[int]:
    """The row of the padding symbol, unless the symbol has another meaning as well.

    Args:
        settings: of a model of transformers, its config.json.
    """
    row = settings.get("pad_token_id")
    others = [settings.get(name) for name in ("bos_token_id", "eos_token_id", "unk_token_id")]
    return [row] if type(row) is int and row >= 0 and row not in others else []
