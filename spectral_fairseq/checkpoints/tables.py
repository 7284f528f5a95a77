"""A model on its way to a table: its tensors by module, and which of them are tables of words.

A table is stored as one matrix or as the factors of :mod:`spectral_fairseq.embeddings`. A shared
table is saved under each of its names; the first one is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Collection, Dict, List, Mapping, Optional, Sequence, Tuple, Type

import torch
from torch import Tensor

from spectral_fairseq.checkpoints.config import text_settings, vocabulary_sizes, writes_words
from spectral_fairseq.checkpoints.dictionary import WordList
from spectral_fairseq.checkpoints.reading import Unread
from spectral_fairseq.checkpoints.shards import Shards
from spectral_fairseq.checkpoints.table_entries import (
    adapted,
    fitting_tables,
    has_output,
    is_output_entry,
    may_be_output,
    may_be_table,
    output_tables,
    uses_of,
)
from spectral_fairseq.checkpoints.tensors import FLOATING
from spectral_fairseq.embeddings import PlainEmbedding, Table
from spectral_fairseq.embeddings.entries import (
    PADDING_ROW,
    dense_form,
    entries_by_module,
    kind_of,
    same_table,
)
from spectral_fairseq.errors import CHOOSE, CheckpointError, ConfigurationError, DataError, listed
from spectral_fairseq.functional.row_blocks import check_finite, rows_outside


@dataclass
class StoredTable:
    """A table of word vectors, without the rows that stand for no word.

    Attributes:
        name: module that holds it in the checkpoint.
        names: all modules that hold it, ``name`` first.
        kind: one of the kinds of :data:`spectral_fairseq.embeddings.TABLES`.
        weight: W, shape (N, d): the rows that count. A plain matrix keeps its type, and its place
            in the file where no row is left out in between; a product of factors is float32
            (float64 if they are).
        rows: the row in the checkpoint of each row of ``weight``, shape (N,).
        stored_rows: number of rows in the checkpoint.
        dtype: in which it is stored.
        orthogonality: distances of stored factors from orthonormal columns, by measure.
        stored_sigma: singular values as learned, largest first, shape (d,), if they are stored.
        initial_norm: the norm that an automatic prior refers to, if it is stored.
    """

    name: str
    names: List[str]
    kind: str
    weight: Tensor
    rows: Tensor
    stored_rows: int
    dtype: str
    orthogonality: Dict[str, float] = field(default_factory=dict)
    stored_sigma: Optional[Tensor] = None
    initial_norm: Optional[float] = None


WordFinder = Callable[[str, int], Tuple[Optional[WordList], str]]


@dataclass
class Tables:
    """A model that was opened, with its tensors by module, and what is known of it.

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
        unread: name -> further arrays, which cannot be read as tables.
        settings: of the model, as its config.json or params.json gives them.
        declared_parts: in how many files the model is, by the settings in this one.
        files: name of a tensor -> the files that hold it, of a model in numbered parts.
        remark: what is said about the tensors beside the choice of a table.
        modules: the same tensors, module -> entry -> tensor.
        turned: names of output layers that are stored as d x N, and are N x d in ``tensors``.
        sizes: the numbers of words that the settings give, of each vocabulary one.
    """

    name: str
    tensors: Mapping[str, Tensor]
    path: Optional[Path] = None
    weights: Optional[Path] = None
    default_table: Optional[str] = None
    find_words: WordFinder = lambda *_: (None, "none given, and the model stores no words")
    uncounted: List[int] = field(default_factory=list)
    arch: Optional[str] = None
    epoch: Optional[int] = None
    updates: Optional[int] = None
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    unread: Mapping[str, Unread] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    declared_parts: int = 1
    files: Mapping[str, List[Path]] = field(default_factory=dict)
    remark: str = ""
    modules: Dict[str, Dict[str, Tensor]] = field(init=False)
    turned: List[str] = field(init=False)
    sizes: List[int] = field(init=False)

    def __post_init__(self) -> None:
        if "embeddings" in self.tensors and "mapping" in self.tensors:  # of model2vec
            self.unread = {**self.unread, "embeddings": self._clusters()}
        self.sizes = vocabulary_sizes(self.settings)
        self.modules = entries_by_module(self.tensors)
        self.turned = self._turned_outputs()
        if isinstance(self.tensors, Shards):
            self.tensors.turn(self.turned)
        elif self.turned:
            upright = {key: self.tensors[key].t() for key in self.turned}
            self.tensors = {**self.tensors, **upright}
        for key in self.turned:
            module, _, entry = key.rpartition(".")
            self.modules[module][entry] = self.tensors[key]

    def _clusters(self) -> Unread:
        """The centres of clusters of words, taken out of the tensors: no table of words."""
        centres = self.tensors["embeddings"]
        self.tensors = {k: v for k, v in self.tensors.items() if k != "embeddings"}
        return Unread(tuple(centres.shape), "centres of clusters of words, to which mapping leads")

    # What is known of the model.

    @property
    def untied(self) -> bool:
        """Whether the settings say that the output layer does not share the input's table."""
        return text_settings(self.settings).get("tie_word_embeddings") is False

    @property
    def tied(self) -> bool:
        """Whether the settings say that the output layer shares the input's table.

        config.json leaves ``tie_word_embeddings`` out where it has its default, which is true for
        the models that write words.
        """
        ties = text_settings(self.settings).get("tie_word_embeddings")
        return ties is True or (ties is None and writes_words(self.settings))

    def files_of(self, table: str) -> List[Path]:
        """The files that hold a table; none for a model in memory."""
        files = self.tensors.files if isinstance(self.tensors, Shards) else self.files
        for key, holders in files.items():
            if key == table or key.rpartition(".")[0] == table:
                return holders
        return [] if self.weights is None else [self.weights]

    # Which tables there are.

    @cached_property
    def groups(self) -> List[List[str]]:
        """The modules that hold each table over words, in the order of the file.

        Two modules hold the same table if they share memory or their values are equal.
        """
        shapes = self._shapes()
        names = fitting_tables(shapes, self.sizes)
        if names and not has_output([names]):
            names += self._nameless_outputs({shapes[name][0] for name in names})
        groups: List[List[str]] = []
        for name in names:
            entries = self.entries_of(name)
            for group in groups:
                if same_table(self.entries_of(group[0]), entries):
                    group.append(name)
                    break
            else:
                groups.append([name])
        return groups

    def _shapes(self) -> Dict[str, Tuple[int, int]]:
        """Rows and columns of the matrices with names of tables, by module."""
        shapes: Dict[str, Tuple[int, int]] = {}
        for module, entries in self.modules.items():
            parent, _, part = module.rpartition(".")
            if part != "table" and f"{parent}.table" in self.modules:  # another matrix of a head
                continue
            for entry in _main_entries(entries):
                bare = entry not in kind_of(entries).entries
                name = f"{module}.{entry}".lstrip(".") if bare else module
                rows, columns = entries[entry].shape
                if may_be_table(name, rows, columns) and not adapted(f"{module}.{entry}"):
                    shapes[name] = rows, columns
        return shapes

    def _turned_outputs(self) -> List[str]:
        """Entries that hold an output layer the other way round, d x N, as in flax and Marian.

        Their columns are the words: as many as an input table has rows, or as the settings say.
        Where an output layer lies as usual, no other is looked for.
        """
        shapes = self._shapes()
        fitting = fitting_tables(shapes, self.sizes)
        outputs = [name for name in fitting if has_output([[name]])]
        inputs = {shapes[name][0] for name in fitting if name not in outputs} | {*self.sizes}
        upright = any(shapes[name][0] in inputs for name in outputs)
        if upright or not inputs or self._nameless_outputs(inputs):
            return []
        known, others = [], []
        for key, value in self.tensors.items():
            module, _, entry = key.rpartition(".")
            if value.dim() != 2 or value.dtype not in FLOATING:
                continue
            if not value.size(1) > value.size(0) > 1:  # a single row is a bias of the scores
                continue
            # A matrix beside others may be a factor of the table, so that it is no layer by itself.
            alone = entry in ("weight", "kernel") and {*self.modules[module]} <= {entry, "bias"}
            if value.size(1) in inputs and (alone or not module):
                name = module if alone else key
                if is_output_entry(key):
                    known.append(key)
                elif may_be_output(name):
                    others.append(key)
        return known or others

    def _nameless_outputs(self, sizes: Collection[int]) -> List[str]:
        """Plain matrices with a row for each word of an input table: its output layers."""
        names = []
        for key, value in self.tensors.items():
            module, _, entry = key.rpartition(".")
            plain = entry == "weight" and {*self.modules[module]} <= {"weight", "bias"}
            name = module if plain else key
            if value.dim() == 2 and value.size(0) in sizes and value.size(0) > value.size(1):
                if entry in ("weight", "kernel", module or key) and may_be_output(name):
                    names.append(name)
        return names

    def only_matrix(self) -> Optional[str]:
        """The name of the only matrix; None if there are several or none."""
        names = [key for key, value in self.tensors.items() if value.dim() == 2]
        return names[0] if len(names) == 1 else None

    def entries_of(self, name: str) -> Mapping[str, Tensor]:
        """What a module stores of a table, or a bare matrix as ``{"weight": matrix}``.

        Raises:
            ConfigurationError: the name is not that of a matrix.
        """
        entries = self._entries_of(name)
        if entries is None:
            raise ConfigurationError("--table to name a matrix", name, CHOOSE)
        return entries

    def _entries_of(self, name: str) -> Optional[Mapping[str, Tensor]]:
        if name in self.tensors:
            return {"weight": self.tensors[name]} if self.tensors[name].dim() == 2 else None
        entries = self.modules.get(name, {})
        return entries if _main_entries(entries) == [kind_of(entries).entries[0]] else None

    def numbers_of(self, name: str) -> Mapping[str, Tensor]:
        """:meth:`entries_of` for a table of floating-point numbers; others are a ``DataError``."""
        entries = self.entries_of(name)
        stored = entries[kind_of(entries).entries[0]]
        if stored.dtype not in FLOATING:
            raise DataError(
                f"floating-point numbers of 16, 32 or 64 bits in {name} of {self.name}",
                dtype_name(stored),
                "Take the model as it was before it was quantized, or choose with --table NAME.",
            )
        return entries

    def shape(self, name: str) -> Tuple[int, int]:
        """The number of rows and dimensions of a table, by a name as in ``groups``.

        Raises:
            ConfigurationError: the name is not that of a matrix.
        """
        entries = self.entries_of(name)
        rows, dim = entries[kind_of(entries).entries[0]].shape
        return rows, dim

    # The one that is asked for.

    def choose(self, wanted: Optional[str]) -> List[str]:
        """The names of the one table to measure.

        Args:
            wanted: value of ``--table``: a module's name, or a part of it that fits only one table,
                or the full name of any matrix of the model. ``None`` stands for the output table,
                or for the only one there is.

        Returns:
            The modules that hold it; the first is the one to read, ``decoder.embed_tokens`` if it
            is among them.

        Raises:
            CheckpointError: no table found, none fits, or several do.
        """
        fitting = self.groups
        if wanted is None and len(fitting) > 1:
            fitting = output_tables(fitting)
        elif wanted is not None:
            exact = wanted.removesuffix(".weight")
            fitting = [names for names in self.groups if exact in names]
            if not fitting and self._entries_of(exact) is not None:
                return [exact]
            if not fitting:
                fitting = [names for names in self.groups if any(wanted in name for name in names)]
        if len(fitting) != 1:
            raise self._no_choice(wanted, fitting)
        return sorted(fitting[0], key=lambda name: name != "decoder.embed_tokens")

    def _no_choice(self, wanted: Optional[str], fitting: Sequence[List[str]]) -> CheckpointError:
        if not self.groups and not any(value.dim() == 2 for value in self.tensors.values()):
            shapes = [f"{key} of shape {tuple(value.shape)}" for key, value in self.tensors.items()]
            remedy = "Give a model, or a matrix with one row for each word."
            return CheckpointError(
                f"a table of shape (N, d) in {self.name}", listed(shapes), remedy
            )
        if not fitting:
            return CheckpointError(
                f"a table {'of word vectors' if wanted is None else repr(wanted)} in {self.name}",
                self._described(self.groups) or "none with a name that such tables usually have",
                f"{CHOOSE} Its matrices are {self._matrices()}.",
            )
        others = self._described([names for names in self.groups if names not in fitting])
        found = f"{len(fitting)}: {self._described(fitting)}" + (others and f" (others: {others})")
        return CheckpointError(f"one table to measure in {self.name}", found, CHOOSE)

    def _matrices(self) -> str:
        """The names and shapes of some matrices, those with the most rows first."""
        matrices = [(key, *value.shape) for key, value in self.tensors.items() if value.dim() == 2]
        matrices.sort(key=lambda matrix: -matrix[1])
        return listed([f"{name} ({rows} x {columns})" for name, rows, columns in matrices], 8)

    def _described(self, groups: Sequence[List[str]]) -> str:
        descriptions = []
        for names in groups:
            kind = kind_of(self.entries_of(names[0])).kind
            rows, dim = self.shape(names[0])
            shared = f" (= {', '.join(names[1:])})" if names[1:] else ""
            descriptions.append(f"{names[0]}{shared}, {kind}, {rows} x {dim}")
        return "; ".join(descriptions)

    def describe_choice(self, names: Sequence[str], outputs: Sequence[str]) -> str:
        """Some sentences: what the chosen table does, and which others there are.

        Args:
            names: of the table.
            outputs: names of what is stored of an output layer that cannot be read.
        """
        if any(names[0] in known for known in self.groups):
            text = f"Measured: {names[0]}, the table of the {' and the '.join(uses_of(names))}."
            text += self._on_the_output(outputs)
        else:
            text = f"Measured: {names[0]}."
        others = [other[0] for other in self.groups if names[0] not in other]
        if others:
            text += f" Not measured: {', '.join(others)} (choose with --table)."
        rows, _ = self.shape(names[0])
        unread = [k for k, v in self.unread.items() if len(v.shape) == 2 and v.shape[0] >= rows]
        if unread:
            text += f" Not readable: {', '.join(unread[:4])}."
        return text

    def _on_the_output(self, outputs: Sequence[str]) -> str:
        if has_output(self.groups):
            return ""
        if outputs:
            return f" The output layer is not measured: {', '.join(outputs)}."
        if self.untied:
            return (
                " The settings say that the output layer has a table of its own, which is not "
                "stored here."
            )
        if self.tied:
            return " The settings say that the output layer shares it."
        return " No output layer is stored: it shares a table, or there is none."

    def extract(
        self, wanted: Optional[str] = None, excluded: Optional[Sequence[int]] = None
    ) -> StoredTable:
        """Read one table.

        Args:
            wanted: as for :meth:`choose`.
            excluded: rows that stand for no word; only fairseq's padding row if not given.

        Raises:
            CheckpointError: as for :meth:`choose`.
            DataError: whole numbers, fewer words than dimensions, or entries that are not finite.
            ConfigurationError: the chosen entry is not a matrix.
        """
        names = self.choose(wanted)
        entries = {entry: value.cpu() for entry, value in self.numbers_of(names[0]).items()}
        kind = kind_of(entries)
        stored = entries[kind.entries[0]]
        stored_rows, dim = stored.shape
        uncounted = sorted(set([PADDING_ROW] if excluded is None else excluded))
        left_out = torch.tensor([row for row in uncounted if row < stored_rows], dtype=torch.long)
        rows = rows_outside(stored_rows, left_out).nonzero().squeeze(1)
        if dim < 1 or len(rows) < dim:
            raise DataError(
                f"at least as many words as dimensions (N >= d) in {names[0]} of {self.name}",
                f"N = {len(rows)} words, padding and made-up rows left out, and d = {dim}",
                "If the matrix is not a table of words, choose another with --table NAME.",
            )
        weight = _rows_of(kind, entries, rows)
        check_finite(weight, f"{names[0]} of {self.name}")
        return StoredTable(
            name=names[0],
            names=names,
            kind=kind.kind,
            weight=weight,
            rows=rows,
            stored_rows=stored_rows,
            dtype=dtype_name(stored),
            **kind.measure_factors(entries, left_out)._asdict(),
        )


def dtype_name(tensor: Tensor) -> str:
    """The type of a tensor's numbers, as ``float16``."""
    return str(tensor.dtype).replace("torch.", "")


def _rows_of(kind: Type[Table], entries: Mapping[str, Tensor], rows: Tensor) -> Tensor:
    """The rows that count, without a copy of a plain matrix if they are consecutive."""
    stored = entries[kind.entries[0]]
    if kind is not PlainEmbedding:
        wide = torch.float64 if stored.dtype == torch.float64 else torch.float32
        return dense_form(kind, entries, rows, wide)
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return stored.detach()[first : last + 1]
    return stored.detach().index_select(0, rows)


def _main_entries(entries: Mapping[str, Tensor]) -> List[str]:
    """The entries of a module that are tables; bare parameters have names of their own.

    flax has kernels where torch has weights.
    """
    main = kind_of(entries).entries[0]
    if main in entries and entries[main].dim() == 2:
        return [main]
    return [
        entry
        for entry, value in entries.items()
        if value.dim() == 2 and (entry == "kernel" or may_be_table(entry, *value.shape))
    ]
