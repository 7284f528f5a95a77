"""Find the tables of word vectors in a checkpoint, and read one of them to be measured.

A table is stored as one matrix or as the factors of :mod:`spectral_fairseq.embeddings`. A shared
table is saved under each of its names; the first one is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Collection, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Type

import torch
from torch import Tensor

from spectral_fairseq.checkpoints.rewriting import (
    PADDING_ROW,
    dense_form,
    entries_by_module,
    factored_kind,
)
from spectral_fairseq.checkpoints.settings import FLOATING
from spectral_fairseq.embeddings import PlainEmbedding, Table
from spectral_fairseq.errors import CheckpointError, ConfigurationError, DataError
from spectral_fairseq.functional.products import BLOCK_ROWS

# By names and shapes: which modules are tables over words, and what each table is used for.
#
# The names are those of fairseq, of the architectures of transformers, of OpenNMT and Marian, and
# of the usual LSTM language models. Other modules have some of these names too, so that
# :func:`fitting_tables` asks for the shape and the place of each.


# Modules that are, or contain, an input table or an output layer over words.
INPUT_TABLES = frozenset(
    "embed_tokens embed_in word_emb word_embedding word_embeddings wte shared emb_luts "
    "token_embedding tok_embeddings tokens_embed".split()
)
OUTPUT_LAYERS = frozenset(
    "output_projection fc_out fc3 embed_out lm_head generator_lm_head vocab_projector "
    "proj_out output_layer generator".split()
)
# Names that other modules have as well: only the module itself is a table, not what is inside it,
# and only if it has more rows than columns.
_OWN_INPUT = frozenset(
    "embedding embeddings embed emb encoder encoder_emb Wemb encoder_Wemb decoder_Wemb".split()
)
_OWN_OUTPUT = frozenset("decoder output head unembed decoder_ff_logit_out_W".split())
PLACES = INPUT_TABLES | OUTPUT_LAYERS
# These are output layers over words, whatever the shapes of other tables.
_SURE_OUTPUT = frozenset(
    "output_projection embed_out lm_head generator_lm_head vocab_projector unembed "
    "decoder_ff_logit_out_W".split()
)
# An output layer in pieces, of which none is a table over all words.
_IN_PIECES = frozenset(("adaptive_softmax",))
# Names of matrices with a row for each word that are no output layers, and what overrules that.
_NO_OUTPUT = re.compile("emb|wpe|wte|pos|type|segment|lang|src|source|encod|look_?up|lut|teacher")
_SURELY_OUTPUT = re.compile("out|logit|head|softmax|classif|predict|unembed|scor")

_ADAPTER = re.compile(
    "(^|_)(lora|dora|hada|lokr|oft|boft|ia3|vera|trainable_tokens|adapters?)(_|$)", re.IGNORECASE
)

_DECODER_INPUT = "decoder.embed_tokens"
_USES = ("encoder's input", "decoder's input", "input", "output layer")


def may_be_table(name: str, rows: int, columns: int) -> bool:
    """Whether a matrix of this shape is a table over words, by the name of its module.

    Args:
        name: of the module, or of the matrix where it is a module's own parameter.
        rows: of the matrix.
        columns: of the matrix.
    """
    *outer, last = name.split(".")
    if last in PLACES or (last == "table" and PLACES & set(outer)):
        return True
    # A head may hold further matrices, such as the dense layer of lm_head in RoBERTa, d x d.
    return rows > columns and (last in _OWN_INPUT | _OWN_OUTPUT or bool(PLACES & set(outer)))


def fitting_tables(shapes: Mapping[str, Tuple[int, int]], words: Sequence[int] = ()) -> List[str]:
    """Those of several matrices with names of tables whose shapes and places are those of tables.

    A table stands beside the layers of a model, and its output layer has a row for each word that
    its input has. So ``mlp.fc_out`` of each layer of GPT-J, d x 4d, is none.

    Args:
        shapes: name -> rows and columns of the matrices that :func:`may_be_table` lets pass.
        words: sizes of the vocabularies, if the settings of the model say them.
    """
    beside = {name: shape for name, shape in shapes.items() if not in_layers(name)}
    sizes = {rows for rows, _ in beside.values()}
    inputs = {rows for name, (rows, _) in beside.items() if _use(name) != _USES[3]} | {*words}
    found = []
    for name, (rows, columns) in shapes.items():
        if name not in beside:
            fits = rows > columns and (not sizes or rows in sizes)
        else:
            unsure = _use(name) == _USES[3] and not _SURE_OUTPUT & {*name.split(".")}
            fits = not (unsure and inputs and rows not in inputs)
        if fits:
            found.append(name)
    return found


def in_layers(name: str) -> bool:
    """Whether a module is a part of a numbered one, by its name: ``h.3.mlp.fc_out`` is."""
    *outer, _ = name.split(".")
    place = next((i for i, part in enumerate(outer) if part in PLACES), len(outer))
    return any(part.isdigit() for part in outer[:place])


def may_be_output(name: str) -> bool:
    """Whether a matrix with a row for each word may be the output layer, by a name not listed."""
    lower = name.lower()
    if in_layers(name) or adapted(name) or PLACES & {*name.split(".")}:
        return False
    return not _NO_OUTPUT.search(lower) or bool(_SURELY_OUTPUT.search(lower))


def is_output_entry(key: str) -> bool:
    """Whether an entry of a state dict belongs to an output layer with one of the known names."""
    module, _, entry = key.rpartition(".")
    if entry in OUTPUT_LAYERS | _OWN_OUTPUT:
        module = key
    parts = module.split(".")
    while len(parts) > 1 and parts[-1] in ("weight", "parametrizations"):
        parts.pop()
    if in_layers(module) or adapted(key):
        return False
    return bool((OUTPUT_LAYERS | _IN_PIECES) & {*parts}) or parts[-1] in _OWN_OUTPUT


def is_surely_output(key: str) -> bool:
    """Whether no other layer has the name to which an entry of a state dict belongs."""
    return bool(OUTPUT_LAYERS & {*key.split(".")})


def is_in_pieces(key: str) -> bool:
    """Whether an entry of a state dict is a piece of an adaptive softmax."""
    return bool(_IN_PIECES & {*key.split(".")})


def adapted(name: str) -> str:
    """The module that an entry of an adapter, such as LoRA's, changes; empty for other entries."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if _ADAPTER.search(part)), 0)
    module = parts[:first]
    return ".".join(module[:-1] if module and module[-1] == "base_layer" else module)


def output_tables(tables: Sequence[List[str]]) -> List[List[str]]:
    """Those of several tables that the softmax uses, or all if their names do not tell.

    Args:
        tables: for each, the modules that hold it.
    """
    return _known_outputs(tables) or list(tables)


def is_output(names: Sequence[str], tables: Sequence[List[str]]) -> bool:
    """Whether the softmax is known to use a table.

    Args:
        names: modules that hold the table.
        tables: for each table of the checkpoint, the modules that hold it.
    """
    return any(names[0] in known for known in _known_outputs(tables))


def _known_outputs(tables: Sequence[List[str]]) -> List[List[str]]:
    """The tables of output layers.

    Checkpoints of old versions do not store an output layer that shares the decoder's input table:
    where there is no output layer, it is the decoder's.
    """
    found = [names for names in tables if any(_use(name) == _USES[3] for name in names)]
    return found or [names for names in tables if any(_is_decoder_input(name) for name in names)]


def known_name_first(names: Sequence[str]) -> List[str]:
    """The modules that hold one table, first the one by which users of fairseq know it."""
    return sorted(names, key=lambda name: name != _DECODER_INPUT)


def describe_choice(
    names: Sequence[str],
    tables: Sequence[List[str]],
    outputs: Sequence[str] = (),
    untied: bool = False,
    unread: Sequence[str] = (),
) -> str:
    """One or two sentences: what the chosen table does, and which others there are.

    Args:
        names: modules that hold the chosen table.
        tables: for each table of the checkpoint, the modules that hold it.
        outputs: what is stored of an output layer, but is not a table that can be read.
        untied: whether the settings say that the output layer does not share the input's table.
        unread: further tables that cannot be read.
    """
    if not any(names[0] in known for known in tables):
        text = f"Measured: {names[0]}."
    else:
        used = {use for name in names for use in _uses(name)}
        uses = [use for use in _USES if use in used]
        text = f"Measured: {names[0]}, the table of the {' and the '.join(uses)}."
        if not has_output(tables):
            text += _without_output(outputs, untied)
    others = [other[0] for other in tables if names[0] not in other]
    if others:
        text += f" Not measured: {', '.join(others)} (choose with --table)."
    if unread:
        text += f" Not readable: {', '.join(unread)}."
    return text


def has_output(tables: Sequence[List[str]]) -> bool:
    """Whether one of the tables is known to be that of an output layer."""
    return any(_use(name) == _USES[3] for known in tables for name in known)


def _without_output(outputs: Sequence[str], untied: bool) -> str:
    if outputs:
        return f" The output layer is not measured: {', '.join(outputs)}."
    if untied:
        return (
            " The settings say that the output layer has a table of its own, which is not stored "
            "here."
        )
    return " No output layer is stored: it shares a table, or there is none."


def _is_decoder_input(name: str) -> bool:
    return name.endswith(_DECODER_INPUT) or _USES[1] in _uses(name)


def _uses(name: str) -> Sequence[str]:
    return _USES[:2] if name.split(".")[-1] == "shared" else (_use(name),)


def _use(name: str) -> str:
    *outer, last = name.split(".")
    if OUTPUT_LAYERS & {*outer, last} or last in _OWN_OUTPUT:
        return _USES[3]
    if not (INPUT_TABLES | _OWN_INPUT) & {*outer, last}:
        return _USES[3]  # without a name of tables, it was found by its shape
    for side, use in (("encoder", _USES[0]), ("decoder", _USES[1])):
        if side in outer or last == f"{side}_Wemb":
            return use
    return _USES[2]


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


class Unread(NamedTuple):
    """A stored array that cannot be read as a table.

    Attributes:
        shape: as stored.
        why: it cannot be read.
    """

    shape: Tuple[int, ...]
    why: str


def find_tables(model: Mapping[str, Tensor], words: Sequence[int] = ()) -> Dict[str, List[str]]:
    """The tables over words in a checkpoint's ``model``.

    Args:
        model: name -> tensor.
        words: sizes of the vocabularies, if the settings of the model say them.

    Returns:
        For each different table the names of the modules that hold it, in the checkpoint's order.
        Two modules hold the same table if they share memory or their values are equal.
    """
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


def _nameless_outputs(model: Mapping[str, Tensor], sizes: Collection[int]) -> List[str]:
    """Plain matrices with a row for each word of an input table, which are its output layers."""
    modules = entries_by_module(model)
    found = []
    for key, value in model.items():
        module, _, entry = key.rpartition(".")
        name = module if entry == "weight" and {*modules[module]} <= {"weight", "bias"} else key
        if value.dim() == 2 and value.size(0) in sizes and value.size(0) > value.size(1):
            if entry in ("weight", module or key) and may_be_output(name):
                found.append(name)
    return found


def unread_outputs(
    model: Mapping[str, Tensor],
    unread: Mapping[str, Unread],
    tables: Sequence[List[str]],
    words: Sequence[int] = (),
) -> Dict[str, str]:
    """What is stored of an output layer, but is not a table that can be read.

    Args:
        model: name -> tensor.
        unread: name -> further arrays, which cannot be read.
        tables: for each table of the model, the modules that hold it.
        words: as for :func:`find_tables`.

    Returns:
        Name -> what it is; empty where a table of an output layer can be read.
    """
    if has_output(tables):
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


def parts_of_outputs(model: Mapping[str, Tensor], tables: Sequence[List[str]]) -> Dict[str, str]:
    """Output layers with a half, a quarter, ... of the rows of the input's table.

    Args:
        model: name -> tensor.
        tables: for each table of the model, the modules that hold it.

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
            if whole and value.size(0) not in inputs and not is_in_pieces(key):
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
    raise CheckpointError(
        f"one table to measure in {path}",
        f"{len(fitting)}: {listed}",
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

    Returns:
        The table.

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
    """The entries of a module that are tables; bare parameters have names of their own."""
    main = _kind(entries).entries[0]
    if main in entries and entries[main].dim() == 2:
        return [main]
    return [
        entry
        for entry, value in entries.items()
        if value.dim() == 2 and may_be_table(entry, *value.shape)
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
