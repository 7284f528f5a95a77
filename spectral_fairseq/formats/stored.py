"""A model as it was read: its tensors by name, and what is known of it beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    Any,
    Callable,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
)

from torch import Tensor

from spectral_fairseq.checkpoints.dictionary import WordList
from spectral_fairseq.formats.config import ModelConfig
from spectral_fairseq.provenance import Noted


class Unread(NamedTuple):
    """A stored array that cannot be read as a table.

    Attributes:
        shape: as stored.
        why: it cannot be read.
    """

    shape: Tuple[int, ...]
    why: str


WordFinder = Callable[[str, int], Tuple[Optional[WordList], str]]
_Named = TypeVar("_Named")


def find_no_words(table: str, rows: int) -> Tuple[Optional[WordList], str]:  # noqa: ARG001
    """What :attr:`Stored.find_words` is for a model that stores none."""
    return None, "none given, and the model stores no words"


def find_listed_words(
    entries: Iterable[Any], table: str, rows: int
) -> Tuple[Optional[WordList], str]:
    """The words in the entry of a file that is a list with one for each row."""
    for words in entries:
        if isinstance(words, list) and len(words) == rows and set(map(type, words)) == {str}:
            return WordList(None, list(words), [0] * rows, []), "stored with the vectors"
    return find_no_words(table, rows)


@dataclass
class Stored:
    """What a file, a folder or a model in memory holds.

    Attributes:
        name: what it is called in messages, usually its path.
        tensors: name -> tensor, mapped from the file where its format allows that. TensorFlow and
            flax separate the parts of a name by slashes, which become dots.
        unread: name -> further arrays, which cannot be read as tables.
        file: that was read; the index of several, and None for a model in memory.
        files: name of a tensor -> its file, of a model in several files.
        noted: the files as they were before they were read.
        beside: names of files whose names differ from that of ``file`` in a number only.
        config: what the model's settings say, as its config.json or params.json gives them.
        arch: name of the architecture, if it is known.
        epoch: epoch of the training, if it is known.
        updates: updates of the training, if they are known.
        training: settings of a fairseq training by node (criterion, model, task); empty for others.
        find_words: (table, number of its rows) -> its words, or None, and a remark on the choice.
        uncounted: rows that stand for no word, where the words are not known.
        only_input: the input table of a model in memory that has one look-up, whatever its name.
        remark: a sentence on where the tensors are from, if there is more to say than the name.
    """

    name: str
    tensors: Mapping[str, Tensor]
    unread: Mapping[str, Unread] = field(default_factory=dict)
    file: Optional[Path] = None
    files: Mapping[str, Path] = field(default_factory=dict)
    noted: Sequence[Noted] = ()
    beside: Sequence[str] = ()
    config: ModelConfig = field(default_factory=ModelConfig)
    arch: Optional[str] = None
    epoch: Optional[int] = None
    updates: Optional[int] = None
    training: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    find_words: WordFinder = find_no_words
    uncounted: List[int] = field(default_factory=list)
    only_input: Optional[str] = None
    remark: str = ""

    def __post_init__(self) -> None:
        self.tensors = with_dots(self.tensors)
        self.unread = with_dots(self.unread)
        self.files = with_dots(self.files)

    def file_of(self, table: str) -> Optional[Path]:
        """The file that holds a table; None for a model in memory."""
        for key, file in self.files.items():
            if key == table or key.rpartition(".")[0] == table:
                return file
        return self.file


def with_dots(named: Mapping[str, _Named]) -> Mapping[str, _Named]:
    """The same under names with dots for slashes, unless two names would become one."""
    dotted = {name.replace("/", "."): one for name, one in named.items()}
    return dotted if len(dotted) == len(named) else named
