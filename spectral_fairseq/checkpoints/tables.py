"""Find the tables of word vectors in a checkpoint, and read one of them to be measured.

A table is stored as one matrix or as the factors of :mod:`spectral_fairseq.embeddings`. A shared
table is saved under each of its names; the first one is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Collection, Dict, List, Mapping, Optional, Sequence, Tuple, Type

import torch
from torch import Tensor

from spectral_fairseq.checkpoints.reading import Unread
from spectral_fairseq.checkpoints.rewriting import (
    PADDING_ROW,
    dense_form,
    entries_by_module,
    factored_kind,
)
from spectral_fairseq.checkpoints.settings import FLOATING
from spectral_fairseq.checkpoints.table_names import (
    adapted,
    fitting_tables,
    has_output,
    has_output_beside,
    is_in_pieces,
    is_output_entry,
    is_surely_output,
    known_name_first,
    may_be_output,
    may_be_table,
    output_tables,
)
from spectral_fairseq.embeddings import PlainEmbedding, Table
from spectral_fairseq.errors import CheckpointError, ConfigurationError, DataError
from spectral_fairseq.functional.products import BLOCK_ROWS

# Over how many devices the rows of a table are usually split.
_DEVICES = (2, 4, 8, 16)


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


def find_tables(model: Mapping[str, Tensor], words: Sequence[int] = ()) -> Dict[str, List[str]]:
    """The tables over words in a checkpoint's ``model``.

    Args:
        model: name -> tensor.
        words: sizes of the vocabularies, if the settings of the model say them.

    Returns:
        For each different table the names of the modules that hold it, in the checkpoint's order.
        Two modules hold the same table if they share memory or their values are equal.
    """
    shapes = _shapes(model)
    names = fitting_tables(shapes, words)
    if names and not has_output([names]):
        names += _nameless_outputs(model, {shapes[name][0] for name in names})
    found: Dict[str, List[str]] = {}
    for name in names:
        for first in found:
            if _same_table(model, first, name):
                found[first].append(name)
                break
        else:
            found[name] = [name]
    return found


def _shapes(model: Mapping[str, Tensor]) -> Dict[str, Tuple[int, int]]:
    """Rows and columns of the matrices with names of tables, by module."""
    shapes: Dict[str, Tuple[int, int]] = {}
    modules = entries_by_module(model)
    for module, entries in modules.items():
        parent, _, part = module.rpartition(".")
        if part != "table" and f"{parent}.table" in modules:  # another matrix of a head
            continue
        for entry in _main_entries(entries):
            bare = entry not in _kind(entries).entries
            name = f"{module}.{entry}".lstrip(".") if bare else module
            rows, columns = entries[entry].shape
            if may_be_table(name, rows, columns) and not adapted(f"{module}.{entry}"):
                shapes[name] = rows, columns
    return shapes


def turned_outputs(model: Mapping[str, Tensor], words: Sequence[int] = ()) -> List[str]:
    """Entries that hold an output layer the other way round, d x N, as flax and Marian store it.

    Their columns are the words: as many as an input table has rows, or as the settings say. Where
    an output layer lies as usual, no other is looked for.

    Args:
        model: name -> tensor.
        words: as for :func:`find_tables`.
    """
    shapes = _shapes(model)
    fitting = fitting_tables(shapes, words)
    inputs = {shapes[name][0] for name in fitting if not has_output([[name]])} | {*words}
    upright = [name for name in fitting if shapes[name][0] in inputs and has_output([[name]])]
    if upright or not inputs or _nameless_outputs(model, inputs):
        return []
    modules = entries_by_module(model)
    known, others = [], []
    for key, value in model.items():
        module, _, entry = key.rpartition(".")
        if value.dim() != 2 or value.dtype not in FLOATING:
            continue
        if not value.size(1) > value.size(0) > 1:  # a single row is a bias of the scores
            continue
        # A matrix beside others may be a factor of the table, so that it is no layer by itself.
        alone = entry in ("weight", "kernel") and {*modules[module]} <= {entry, "bias"}
        if value.size(1) in inputs and (alone or not module):
            name = module if alone else key
            if is_output_entry(key):
                known.append(key)
            elif may_be_output(name):
                others.append(key)
    return known or others


def _nameless_outputs(model: Mapping[str, Tensor], sizes: Collection[int]) -> List[str]:
    """Plain matrices with a row for each word of an input table, which are its output layers."""
    modules = entries_by_module(model)
    found = []
    for key, value in model.items():
        module, _, entry = key.rpartition(".")
        name = module if entry == "weight" and {*modules[module]} <= {"weight", "bias"} else key
        if value.dim() == 2 and value.size(0) in sizes and value.size(0) > value.size(1):
            if entry in ("weight", "kernel", module or key) and may_be_output(name):
                found.append(name)
    return found


def unread_outputs(
    model: Mapping[str, Tensor],
    unread: Mapping[str, Unread],
    tables: Sequence[List[str]],
    words: Sequence[int] = (),
) -> Dict[str, str]:
    """What is stored of an output layer, but is not a table that can be read.

    Returns:
        Name -> what it is; empty where a table of an output layer can be read.
    """
    if has_output_beside(tables):
        return {}
    sizes = {table_shape(model, names[0])[0] for names in tables} | {*words}
    # DeepSpeed leaves parameters without numbers; other vectors are biases and scales.
    found = {
        key: one.why
        for key, one in unread.items()
        if is_output_entry(key) and (len(one.shape) > 1 or one.shape == (0,))
    }
    for key, value in model.items():
        if value.dim() < 2 or not is_output_entry(key):
            continue
        if is_in_pieces(key):
            found[key] = "a piece of an adaptive softmax"
        elif value.dtype not in FLOATING and (is_surely_output(key) or sizes & {*value.shape}):
            found[key] = f"quantized or packed numbers, {_dtype(value)}"
        # Heads have other matrices of their own, and other heads, of images for example, as well.
        elif value.dtype in FLOATING and key.rpartition(".")[2] != "weight":
            if sizes & {*value.shape}:
                shape = " x ".join(map(str, value.shape))
                found[key] = f"{shape} numbers, from which W is computed"
    return found


def parts_of_outputs(
    model: Mapping[str, Tensor], tables: Sequence[List[str]], sizes: Sequence[int]
) -> Dict[str, str]:
    """Output layers with a half, a quarter, ... of the rows of the input's table.

    Args:
        model: name -> tensor.
        tables: as :func:`find_tables` returns them.
        sizes: of the vocabularies, by the settings. An output layer of one of them is whole, and
            the larger table that of something else, such as all codebooks of an audio model.

    Returns:
        Name -> what it is.
    """
    inputs = {
        table_shape(model, names[0])[0]
        for names in tables
        if not any(is_output_entry(f"{name}.") or "encoder" in name.split(".") for name in names)
    }
    found = {}
    for key, value in model.items():
        if value.dim() == 2 and value.size(0) > value.size(1) and is_output_entry(key):
            whole = [rows for rows in inputs if rows in (value.size(0) * k for k in _DEVICES)]
            known = value.size(0) in inputs or value.size(0) in sizes
            if whole and not known and not is_in_pieces(key):
                found[key] = f"{value.size(0)} rows, a part of {whole[0]}"
    return found


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).replace("torch.", "")


def choose_table(
    model: Mapping[str, Tensor],
    wanted: Optional[str],
    path: Any,
    words: Sequence[int] = (),
) -> List[str]:
    """The names of the one table to measure.

    Args:
        model: name -> tensor.
        wanted: value of ``--table``: a module's name, or a part of it that fits only one table,
            or the full name of any matrix of the model. ``None`` stands for the output table, or
            for the only one there is.
        path: of the checkpoint, for messages.
        words: as for :func:`find_tables`.

    Returns:
        The modules that hold it; the first is the one to read, ``decoder.embed_tokens`` if it is
        among them.

    Raises:
        CheckpointError: no table found, none fits, or several do.
    """
    tables = find_tables(model, words)
    fitting = list(tables.values())
    if wanted is None and len(fitting) > 1:
        fitting = output_tables(fitting)
    elif wanted is not None:
        exact = wanted[: -len(".weight")] if wanted.endswith(".weight") else wanted
        fitting = [names for names in tables.values() if exact in names]
        if not fitting and _entries_of(model, exact) is not None:
            return [exact]
        if not fitting:
            fitting = [names for names in tables.values() if any(wanted in name for name in names)]
    if len(fitting) == 1:
        return known_name_first(fitting[0])
    listed = "; ".join(_describe(model, names) for names in tables.values()) or "none"
    if not tables and not any(value.dim() == 2 for value in model.values()):
        shapes = [f"{key} of shape {tuple(value.shape)}" for key, value in model.items()]
        raise CheckpointError(
            f"a table of shape (N, d) in {path}",
            ", ".join(shapes[:4]) or "no tensor",
            "Give a model, or a matrix with one row for each word.",
        )
    if not tables and wanted is not None:
        raise CheckpointError(
            f"a table {wanted!r} in {path}", f"only {_matrices(model)}", "Correct --table."
        )
    if not tables:
        raise CheckpointError(
            f"a table of word vectors in {path}",
            f"{len(model)} tensors, none with a name that such tables usually have",
            "If the model has one under another name, give it with --table NAME; its matrices "
            f"are {_matrices(model)}.",
        )
    if not fitting:
        raise CheckpointError(
            f"a table {wanted!r} in {path}",
            listed,
            "Give one of these with --table NAME, or the full name of another matrix: "
            f"{_matrices(model)}.",
        )
    others = [_describe(model, names) for names in tables.values() if names not in fitting]
    raise CheckpointError(
        f"one table to measure in {path}",
        f"{len(fitting)}: {'; '.join(_describe(model, names) for names in fitting)}"
        + (f" (others: {'; '.join(others)})" if others else ""),
        "Choose one with --table NAME.",
    )


def only_matrix(model: Mapping[str, Tensor]) -> Optional[str]:
    """The name of the only matrix; None if there are several or none."""
    found = [key for key, value in model.items() if value.dim() == 2]
    return found[0] if len(found) == 1 else None


def table_shape(model: Mapping[str, Tensor], name: str) -> Tuple[int, int]:
    """The number of rows and dimensions of a table by the name that :func:`choose_table` gave.

    Raises:
        ConfigurationError: the name is not that of a matrix.
    """
    entries = _entries_of(model, name)
    if entries is None:
        raise ConfigurationError(
            "--table to name a matrix", name, "Give a module that holds word vectors."
        )
    rows, dim = entries[_kind(entries).entries[0]].shape
    return rows, dim


def extract_table(
    model: Mapping[str, Tensor],
    path: Any,
    wanted: Optional[str] = None,
    excluded: Optional[Sequence[int]] = None,
) -> StoredTable:
    """Read one table.

    Args:
        model: name -> tensor; not changed.
        path: of the checkpoint, for messages.
        wanted: as for :func:`choose_table`.
        excluded: rows that stand for no word; only fairseq's padding row if not given.

    Raises:
        CheckpointError: as for :func:`choose_table`.
        DataError: fewer words than dimensions, or entries that are not finite.
        ConfigurationError: the chosen entry is not a matrix.
    """
    names = choose_table(model, wanted, path)
    stored_rows, dim = table_shape(model, names[0])
    entries = {key: value.cpu() for key, value in (_entries_of(model, names[0]) or {}).items()}
    kind = _kind(entries)
    stored = entries[kind.entries[0]].dtype
    if stored not in FLOATING:
        raise DataError(
            f"floating-point numbers of 16, 32 or 64 bits in {names[0]} of {path}",
            f"{stored}".replace("torch.", ""),
            "Take the model as it was before it was quantized, or choose with --table NAME.",
        )
    uncounted = sorted(set([PADDING_ROW] if excluded is None else excluded))
    left_out = torch.tensor([row for row in uncounted if row < stored_rows], dtype=torch.long)
    counted = torch.ones(stored_rows, dtype=torch.bool)
    counted[left_out] = False
    rows = counted.nonzero().squeeze(1)
    if dim < 1 or len(rows) < dim:
        raise DataError(
            f"at least as many words as dimensions (N >= d) in {names[0]} of {path}",
            f"N = {len(rows)} words, padding and made-up rows left out, and d = {dim}",
            "If the matrix is not a table of words, choose another with --table NAME.",
        )
    weight = _rows_of(kind, entries, rows)
    _check_finite(weight, f"{names[0]} of {path}")
    return StoredTable(
        name=names[0],
        names=names,
        kind=kind.kind,
        weight=weight,
        rows=rows,
        stored_rows=stored_rows,
        dtype=str(stored).replace("torch.", ""),
        **kind.measure_factors(entries, left_out)._asdict(),
    )


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


def _check_finite(weight: Tensor, name: str) -> None:
    broken = 0
    narrow = torch.float64 if weight.dtype == torch.float64 else torch.float32
    for block in weight.split(BLOCK_ROWS):
        # A sum beyond float32 only means a closer look.
        if not torch.isfinite(block.sum(dtype=narrow)):
            broken += int((~torch.isfinite(block).all(1)).sum())
    if broken:
        raise DataError(
            f"finite numbers in {name}",
            f"infinity or NaN in {broken} of {len(weight)} rows",
            "Training diverged, or the file is damaged: take an earlier checkpoint.",
        )


def _kind(entries: Mapping[str, Tensor]) -> Type[Table]:
    return factored_kind(entries) or PlainEmbedding


def _main_entries(entries: Mapping[str, Tensor]) -> List[str]:
    """The entries of a module that are tables; bare parameters have names of their own.

    flax has kernels where torch has weights.
    """
    main = _kind(entries).entries[0]
    if main in entries and entries[main].dim() == 2:
        return [main]
    return [
        entry
        for entry, value in entries.items()
        if value.dim() == 2 and (entry == "kernel" or may_be_table(entry, *value.shape))
    ]


def _entries_of(model: Mapping[str, Tensor], name: str) -> Optional[Dict[str, Tensor]]:
    """Entries of a module, or a bare matrix as ``{"weight": matrix}``; None if there is neither."""
    if name in model:
        return {"weight": model[name]} if model[name].dim() == 2 else None
    entries = entries_by_module(model).get(name, {})
    return dict(entries) if _main_entries(entries) == [_kind(entries).entries[0]] else None


def _same_table(model: Mapping[str, Tensor], a: str, b: str) -> bool:
    one, other = _entries_of(model, a) or {}, _entries_of(model, b) or {}
    kind = _kind(one)
    if kind is not _kind(other):
        return False
    for entry in kind.entries:
        x, y = one[entry], other[entry]
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        # Training on a GPU, and tools that rewrite checkpoints, store shared tables apart.
        if x.data_ptr() != y.data_ptr() and not torch.equal(x, y):
            return False
    return True


def _matrices(model: Mapping[str, Tensor]) -> str:
    """The names and shapes of some matrices, those with the most rows first."""
    found = [(key, *value.shape) for key, value in model.items() if value.dim() == 2]
    found.sort(key=lambda matrix: -matrix[1])
    shown = ", ".join(f"{name} ({rows} x {columns})" for name, rows, columns in found[:8])
    return f"{shown}, ..." if len(found) > 8 else shown or "none"


def _describe(model: Mapping[str, Tensor], names: List[str]) -> str:
    kind = _kind(_entries_of(model, names[0]) or {}).kind
    rows, dim = table_shape(model, names[0])
    shared = f" (= {', '.join(names[1:])})" if names[1:] else ""
    return f"{names[0]}{shared}, {kind}, {rows} x {dim}"
