"""The matrices of a model, and which of them are tables over words.

Names, shapes and settings decide, by the roles of :mod:`spectral_fairseq.formats.roles`; numbers
only tell which modules hold the same table.
"""

from __future__ import annotations

from typing import Any, Collection, Dict, List, Mapping, Optional, Sequence, Tuple

from torch import Tensor

from spectral_fairseq.checkpoints.tensors import FLOATING
from spectral_fairseq.embeddings.entries import (
    entries_by_module,
    factored_kind,
    kind_of,
    same_table,
)
from spectral_fairseq.errors import CHOOSE, CheckpointError, ConfigurationError, listed
from spectral_fairseq.formats.roles import (
    adapted,
    has_output_beside,
    in_layers,
    is_in_pieces,
    is_output_entry,
    is_output_name,
    is_surely_output,
    may_be_output,
    may_be_table,
    output_tables,
    role_of,
)
from spectral_fairseq.formats.stored import Stored, Unread

# By how many rows a table may be larger than the vocabulary of another.
_MOST_FURTHER_ROWS = 1024
# How many numbers of a row tell tables apart before all are compared.
_MARKED = 8
MOST_NAMED = 20

Shapes = Mapping[str, Tuple[int, int]]
"""Name of a module, or of a matrix without one -> rows and columns."""


class Matrices:
    """The matrices of a model by the modules that hold them, output layers upright as N x d.

    Attributes:
        stored: the model.
        sizes: the numbers of words that its settings give, of each vocabulary one.
        tensors: name -> tensor.
        unread: name -> what cannot be read as a table.
        modules: module -> entry -> tensor.
        lying: names of output layers that are stored as d x N.
        tables: the modules that hold each table over words, in the order of the file. Two modules
            hold the same table if they share memory or their values are equal.
    """

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self.tensors, self.unread = stored.tensors, stored.unread
        if "embeddings" in self.tensors and "mapping" in self.tensors:
            self._leave_out_clusters()
        self.sizes = stored.config.sizes
        if factored_kind(entries_by_module(self.tensors).get("", {})):  # a table alone
            self.tensors = {f"table.{key}": tensor for key, tensor in self.tensors.items()}
        self.modules = entries_by_module(self.tensors)
        shapes = self._table_shapes()
        self.lying = self._lying_outputs(shapes)
        if self.lying:
            upright = {key: self.tensors[key].t() for key in self.lying}
            self.tensors = {**self.tensors, **upright}
            self.modules = entries_by_module(self.tensors)
            shapes = self._table_shapes()
        self.tables = self._tables(shapes)

    def _leave_out_clusters(self) -> None:
        # model2vec stores the centre of a cluster of words once, and the cluster of each word.
        shape = tuple(self.tensors["embeddings"].shape)
        clusters = Unread(shape, "centres of clusters of words, to which mapping leads")
        self.unread = {**self.unread, "embeddings": clusters}
        self.tensors = {k: tensor for k, tensor in self.tensors.items() if k != "embeddings"}

    def _tables(self, shapes: Shapes) -> List[List[str]]:
        names = [*shapes]
        if names and not any(map(is_output_name, names)):
            names += self._nameless_outputs({rows for rows, _ in shapes.values()})
        tables: List[List[str]] = []
        alike: Dict[Any, List[List[str]]] = {}
        for name in names:
            entries = self.entries_of(name)
            others = alike.setdefault(_mark(entries), [])
            for table in others:
                if same_table(self.entries_of(table[0]), entries):
                    table.append(name)
                    break
            else:
                others.append([name])
                tables.append(others[-1])
        return tables

    def _table_shapes(self) -> Shapes:
        """Those of the matrices that are tables over words, by their names and shapes."""
        shapes: Dict[str, Tuple[int, int]] = {}
        for module, entries in self.modules.items():
            parent, _, part = module.rpartition(".")
            if part != "table" and f"{parent}.table" in self.modules:  # another matrix of a head
                continue
            kind = kind_of(entries)
            for entry in _main_entries(entries):
                whole = entry == kind.entries[0]
                name = module if whole else f"{module}.{entry}".lstrip(".")
                rows, columns = kind.stored_shape(entries) if whole else entries[entry].shape
                if may_be_table(name, rows, columns) and not adapted(f"{module}.{entry}"):
                    shapes[name] = rows, columns
        return _fitting_tables(shapes, self.sizes)

    def _lying_outputs(self, shapes: Shapes) -> List[str]:
        """Entries that hold an output layer the other way round, d x N, as in flax and Marian.

        Their columns are the words: as many as an input table has rows, or as the settings say.
        Where an output layer lies as usual, no other is looked for.
        """
        outputs = {rows for name, (rows, _) in shapes.items() if is_output_name(name)}
        inputs = {rows for name, (rows, _) in shapes.items() if not is_output_name(name)}
        inputs.update(self.sizes)
        upright = not inputs.isdisjoint(outputs)
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
            alone = entry in _MATRICES and {*self.modules[module]} <= {entry, "bias", "b"}
            if value.size(1) in inputs and (alone or not module):
                name = module if alone else key
                if is_output_entry(key):
                    known.append(key)
                elif may_be_output(name):
                    others.append(key)
        return known or others

    def _nameless_outputs(self, sizes: Collection[int]) -> List[str]:
        """Plain matrices with a row for each word of an input table: its output layers."""
        return [name for name, rows in self._tall_matrices() if rows in sizes]

    def larger_outputs(self, count: int) -> List[str]:
        """The same with ``count`` rows or somewhat more, as of a transducer, which has a blank."""
        known = {name for table in self.tables for name in table}
        sizes = range(count, count + _MOST_FURTHER_ROWS)
        return [name for name, rows in self._tall_matrices() if rows in sizes and name not in known]

    def _tall_matrices(self) -> List[Tuple[str, int]]:
        """Matrices that may be output layers under any name, and their rows."""
        found = []
        for key, value in self.tensors.items():
            if value.dim() != 2 or not value.size(0) > value.size(1):
                continue
            module, _, entry = key.rpartition(".")
            plain = entry == "weight" and {*self.modules[module]} <= {"weight", "bias"}
            name = module if plain else key
            if (not module or entry in _MATRICES) and may_be_output(name):
                found.append((name, value.size(0)))
        return found

    def only_matrix(self) -> Optional[str]:
        """The name of the only matrix; None if there are several or none."""
        names = [*self._matrices()]
        return names[0] if len(names) == 1 else None

    def _matrices(self) -> Shapes:
        """Rows and columns of each matrix by its name, or by its module's if it is of factors."""
        found: Dict[str, Tuple[int, int]] = {}
        for module, entries in self.modules.items():
            kind = factored_kind(entries)
            if kind is not None:
                found[module] = kind.stored_shape(entries)
                continue
            for entry, value in entries.items():
                if value.dim() == 2:
                    found[f"{module}.{entry}" if module else entry] = value.size(0), value.size(1)
        return found

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

    def shape(self, name: str) -> Tuple[int, int]:
        """(N, d) of a table.

        Raises:
            ConfigurationError: the name is not that of a matrix.
        """
        entries = self.entries_of(name)
        return kind_of(entries).stored_shape(entries)

    def named(self, wanted: Optional[str]) -> List[str]:
        """The modules that hold the table of a name, or that of the output layer; see `choose`.

        ``decoder.embed_tokens``, which users know, is the first if it is among them.
        """
        fitting = self.tables
        if wanted is None and len(fitting) > 1:
            fitting = output_tables(fitting)
        elif wanted is not None:
            exact = wanted.removesuffix(".weight")
            fitting = [names for names in self.tables if exact in names]
            if not fitting and self._entries_of(exact) is not None:
                return [exact]
            if not fitting:
                fitting = [names for names in self.tables if any(wanted in name for name in names)]
        if len(fitting) != 1:
            raise self._no_choice(wanted, fitting)
        return sorted(fitting[0], key=lambda name: name != "decoder.embed_tokens")

    def _no_choice(self, wanted: Optional[str], fitting: Sequence[List[str]]) -> CheckpointError:
        where = self.stored.name
        matrices = [(name, *shape) for name, shape in self._matrices().items()]
        if not self.tables and not matrices:
            shapes = [f"{key} of shape {tuple(value.shape)}" for key, value in self.tensors.items()]
            remedy = "Give a model, or a matrix with one row for each word."
            return CheckpointError(f"a table of shape (N, d) in {where}", listed(shapes), remedy)
        if not fitting:
            matrices.sort(key=lambda matrix: -matrix[1])  # those with the most rows first
            named = listed([f"{name} ({rows} x {dim})" for name, rows, dim in matrices], 8)
            return CheckpointError(
                f"a table {'of word vectors' if wanted is None else repr(wanted)} in {where}",
                self._described(self.tables) or "none with a name that such tables usually have",
                f"{CHOOSE} Its matrices are {named}.",
            )
        these = {names[0] for names in fitting}
        others = self._described([names for names in self.tables if names[0] not in these])
        found = f"{len(fitting)}: {self._described(fitting)}" + (others and f" (others: {others})")
        return CheckpointError(f"one table to measure in {where}", found, CHOOSE)

    def _described(self, tables: Sequence[List[str]]) -> str:
        descriptions = []
        for names in tables[:MOST_NAMED]:
            rows, dim = self.shape(names[0])
            kind = kind_of(self.entries_of(names[0])).kind
            shared = f" (= {', '.join(names[1:])})" if names[1:] else ""
            descriptions.append(f"{names[0]}{shared}, {kind}, {rows} x {dim}")
        return "; ".join([*descriptions, *(["..."] if len(tables) > MOST_NAMED else [])])

    def unread_outputs(self) -> Dict[str, str]:
        """What is stored of an output layer, but is not a table that can be read.

        Returns:
            Name -> what it is; empty where a table of an output layer can be read.
        """
        if has_output_beside(self.tables):
            return {}
        sizes = {self.shape(names[0])[0] for names in self.tables} | {*self.sizes}
        # DeepSpeed leaves parameters without numbers; other vectors are biases and scales.
        reasons = {
            key: unread.why
            for key, unread in self.unread.items()
            if is_output_entry(key) and (len(unread.shape) > 1 or unread.shape == (0,))
        }
        for key, value in self.tensors.items():
            if value.dim() < 2 or not is_output_entry(key):
                continue
            if is_in_pieces(key):
                reasons[key] = "a piece of an adaptive softmax"
            elif value.dtype not in FLOATING and (is_surely_output(key) or sizes & {*value.shape}):
                reasons[key] = f"quantized or packed numbers, {dtype_name(value)}"
            # Heads have other matrices of their own, and other heads, of images for example, too.
            elif value.dtype in FLOATING and key.rpartition(".")[2] != "weight":
                if sizes & {*value.shape}:
                    shape = " x ".join(map(str, value.shape))
                    reasons[key] = f"{shape} numbers, from which W is computed"
        return reasons


def _fitting_tables(shapes: Shapes, words: Sequence[int]) -> Shapes:
    """Those of several matrices with names of tables whose shapes and places are those of tables.

    A table stands beside the layers of a model, and its output layer has a row for each word that
    its input has. So ``mlp.fc_out`` of each layer of GPT-J, d x 4d, is none.

    Args:
        shapes: name -> rows and columns of the matrices that :func:`may_be_table` lets pass.
        words: sizes of the vocabularies, if the settings of the model say them.
    """
    beside = {name: shape for name, shape in shapes.items() if not in_layers(name)}
    sizes = {rows for rows, _ in beside.values()}
    inputs = {rows for name, (rows, _) in beside.items() if not is_output_name(name)} | {*words}
    fitting = {}
    for name, (rows, columns) in shapes.items():
        if name not in beside:
            fits = rows > columns and (not sizes or rows in sizes)
        else:
            role = role_of(name)
            unsure = is_output_name(name) and not (role is not None and role.sure)
            fits = not (unsure and inputs and rows not in inputs)
        if fits:
            fitting[name] = rows, columns
    return fitting


# Names of the matrix of a layer; flax has kernels where torch has weights.
_MATRICES = ("weight", "kernel", "W")


def _main_entries(entries: Mapping[str, Tensor]) -> List[str]:
    """The entries of a module that are tables; bare parameters have names of their own."""
    main = kind_of(entries).entries[0]
    if main in entries and entries[main].dim() == 2:
        return [main]
    return [
        entry
        for entry, value in entries.items()
        if value.dim() == 2 and (entry == "kernel" or may_be_table(entry, *value.shape))
    ]


def _mark(entries: Mapping[str, Tensor]) -> Tuple[Any, ...]:
    """What tables have in common that may be equal: kind, shape and some of the numbers."""
    kind = kind_of(entries)
    main = entries[kind.entries[0]]
    rows = [main[row, :_MARKED].double() + 0.0 for row in {0, len(main) // 2, -1} if len(main)]
    return kind, main.shape, repr([row.tolist() for row in rows])


def dtype_name(tensor: Tensor) -> str:
    """The type of a tensor's numbers, as ``float16``."""
    return str(tensor.dtype).replace("torch.", "")
