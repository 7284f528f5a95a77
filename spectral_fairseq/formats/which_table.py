"""Which table of a model is measured: the one that is asked for, or that of the output layer.

What would measure another table than the one that was asked for is refused, and so are parts of
tables, tables of no numbers, and tables in two copies that differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Sequence, Tuple, Type

from torch import Tensor

from spectral_fairseq.embeddings import Table
from spectral_fairseq.embeddings.entries import kind_of
from spectral_fairseq.errors import CHOOSE, CheckpointError, DataError, listed
from spectral_fairseq.formats.config import writes_words
from spectral_fairseq.formats.matrices import Matrices
from spectral_fairseq.formats.roles import (
    adapted,
    has_output,
    has_output_beside,
    is_in_pieces,
    is_output,
    is_output_entry,
    is_output_name,
    output_tables,
)
from spectral_fairseq.formats.stored import Stored

# Over how many devices the rows of a table are usually split.
_DEVICES = (2, 4, 8, 16)

STORED, UNREAD, OWN, SHARED = "stored", "unread", "own", "shared"
BY_DEFAULT, UNKNOWN = "shared by default", "unknown"


@dataclass
class Choice:
    """The table of a model that is measured, and what a report says about it.

    Attributes:
        model: that has it.
        names: the modules that hold it; the first is the one to read.
        entries: what that module stores.
        tables: the names of every table over words, of which this need not be one.
        output: what is known of the output layer: a table of one is ``STORED``; what is stored
            of it is ``UNREAD``; by the settings it has a table of its ``OWN``, which is not
            stored, or a ``SHARED`` one, which may follow from the class alone
            (``BY_DEFAULT``); or it is ``UNKNOWN``.
        of_softmax: whether the softmax is known to use this table.
        unread_outputs: names of what is stored of an output layer that cannot be read.
        possible_outputs: matrices with as many rows or somewhat more under names that are not
            known, where the output layer is.
        unread: names of other matrices with as many rows, which cannot be read.
        lies: whether it is stored as d x N.
        declared: what the settings say of its size, where it has another.
    """

    model: Stored
    names: List[str]
    entries: Mapping[str, Tensor]
    tables: List[List[str]]
    output: str
    of_softmax: bool
    unread_outputs: List[str]
    possible_outputs: List[str]
    unread: List[str]
    lies: bool
    declared: str

    @property
    def kind(self) -> Type[Table]:
        """The kind of table."""
        return kind_of(self.entries)

    @property
    def shape(self) -> Tuple[int, int]:
        """(N, d)."""
        return self.kind.stored_shape(self.entries)

    @property
    def is_known(self) -> bool:
        """Whether the table is one of those over words, rather than any matrix."""
        return any(self.names[0] in names for names in self.tables)


def choose(stored: Stored, wanted: Optional[str] = None) -> Choice:
    """The table that was asked for, or that of the output layer.

    Args:
        stored: the model.
        wanted: value of ``--table``: a module's name, or a part of it that fits only one table, or
            the full name of any matrix of the model. ``None`` stands for the output table, or for
            the only one there is.

    Raises:
        CheckpointError: no table is found, none fits, or several do; or the table is stored in a
            form that is not read, not stored here, or in two copies that differ.
        DataError: its rows have no numbers.
    """
    matrices = Matrices(stored)
    tables = matrices.tables
    unread = matrices.unread_outputs()
    if wanted is None:
        _check_output(matrices, unread)
        default = None if tables else stored.only_input or matrices.only_matrix()
        names = matrices.named(default)
    else:
        wanted = wanted.replace("/", ".") if wanted not in stored.tensors else wanted
        _check_asked(matrices, wanted)
        names = matrices.named(wanted)
    _check_not_adapted(matrices, names, wanted)
    rows, dim = matrices.shape(names[0])
    if dim < 1:  # a file may declare any number of rows without numbers
        found = f"{rows:,} rows of {dim} numbers"
        raise DataError(f"vectors of numbers in {names[0]} of {stored.name}", found, CHOOSE)
    if has_output(tables):
        output = STORED
    elif unread:
        output = UNREAD
    elif stored.config.shares is not None:
        output = SHARED if stored.config.shares else OWN
    else:
        output = BY_DEFAULT if stored.config.by_default else UNKNOWN
    return Choice(
        model=stored,
        names=names,
        entries=matrices.entries_of(names[0]),
        tables=tables,
        output=output,
        of_softmax=is_output(names, tables) or output in (SHARED, BY_DEFAULT),
        unread_outputs=list(unread),
        possible_outputs=matrices.larger_outputs(rows) if output == UNKNOWN else [],
        unread=[
            name
            for name, array in matrices.unread.items()
            if len(array.shape) == 2 and array.shape[0] >= rows
        ],
        lies=any(key in (names[0], f"{names[0]}.weight") for key in matrices.lying),
        declared=_declared_otherwise(matrices, names, wanted),
    )


def _check_asked(matrices: Matrices, wanted: str) -> None:
    """Refuse a name of what cannot be read."""
    name = wanted.removesuffix(".weight")
    if not any(f"{key}.".startswith(f"{name}.") for key in matrices.tensors):
        asked = {k: v.why for k, v in matrices.unread.items() if f"{k}.".startswith(f"{name}.")}
        _refuse_unread(matrices.stored, asked)


def _check_output(matrices: Matrices, unread: Mapping[str, str]) -> None:
    """Refuse a model of which another table than that of the output layer would be measured."""
    stored, tables = matrices.stored, matrices.tables
    _check_copies(matrices)
    _refuse_unread(stored, {} if all(map(is_in_pieces, unread)) else unread)
    _refuse_unread(stored, _parts_of_outputs(matrices))
    adapters = sorted({adapted(key) for key in matrices.tensors} - {""})
    changed = [name for name in adapters if is_output_entry(f"{name}.")]
    if has_output(tables):
        changed = []
    if changed or (not tables and adapters and all(map(adapted, matrices.tensors))):
        raise _of_an_adapter(stored, changed or adapters)
    if not tables:
        single = matrices.only_matrix()
        rows = matrices.shape(single)[0] if single is not None else 0
        larger = {k: v for k, v in matrices.unread.items() if v.shape[1:] and v.shape[0] >= rows}
        _refuse_unread(stored, {key: array.why for key, array in larger.items()})
    elif stored.config.shares is False and not unread and not has_output(tables):
        if writes_words(stored.arch or ""):
            raise CheckpointError(
                f"the output layer of {stored.arch}, which has a table of its own by the settings, "
                f"in {stored.name}",
                f"none under a known name beside {', '.join(names[0] for names in tables)}",
                "Give the file that holds it, or choose a table with --table NAME.",
            )


def _check_copies(matrices: Matrices) -> None:
    """Refuse a file whose output layer has other numbers than the table that it shares.

    Some programs then take the one, some the other, and some do not share them. In memory two
    parameters are two.
    """
    stored, tables = matrices.stored, matrices.tables
    if stored.file is None or stored.config.shares is not True:
        return
    shapes = {names[0]: matrices.shape(names[0]) for names in tables}
    outputs = [names for names in output_tables(tables) if has_output_beside([names])]
    for output in outputs:
        if not all(map(is_output_name, output)):
            continue  # which is one with a table of the input
        others = [
            names[0]
            for names in tables
            if not any(map(is_output_name, names)) and shapes[names[0]] == shapes[output[0]]
        ]
        if others:
            raise CheckpointError(
                f"{output[0]} to equal {' or '.join(others)} in {stored.name}, which share one "
                "table by tie_word_embeddings",
                "different values",
                "Set tie_word_embeddings to false in config.json if the model was trained so; or "
                "choose one with --table NAME.",
            )


def _refuse_unread(stored: Stored, unread: Mapping[str, str]) -> None:
    if unread:
        raise CheckpointError(
            f"a table that can be read in {stored.name}",
            listed([f"{name}: {why}" for name, why in unread.items()], separator="; "),
            "Save the model with floating-point numbers in one matrix, as it was before it was "
            "quantized or split, or choose another table with --table NAME.",
        )


def _parts_of_outputs(matrices: Matrices) -> Dict[str, str]:
    """Output layers with a half, a quarter, ... of the rows of the input's table.

    An output layer with as many rows as the settings say is whole, and the larger table that of
    something else, such as all codebooks of an audio model.

    Returns:
        Name -> what it is.
    """
    inputs = {
        matrices.shape(names[0])[0]
        for names in matrices.tables
        if not any(is_output_entry(f"{name}.") or "encoder" in name.split(".") for name in names)
    }
    parts = {}
    for key, value in matrices.tensors.items():
        if value.dim() == 2 and value.size(0) > value.size(1) and is_output_entry(key):
            whole = [rows for rows in inputs if rows in (value.size(0) * k for k in _DEVICES)]
            known = value.size(0) in inputs or value.size(0) in matrices.sizes
            if whole and not known and not is_in_pieces(key):
                parts[key] = f"{value.size(0)} rows, a part of {whole[0]}"
    return parts


def _of_an_adapter(stored: Stored, modules: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"whole tables in {stored.name}",
        f"an adapter, such as LoRA's, that changes {listed(modules)}",
        "Merge it into the model first (merge_and_unload() of peft), or choose the unchanged table "
        "with --table NAME.base_layer where the model has one.",
    )


def _check_not_adapted(matrices: Matrices, names: Sequence[str], wanted: Optional[str]) -> None:
    """Refuse a table that an adapter changes."""
    changed = {adapted(key) for key in [*matrices.tensors, *matrices.unread]} - {""}
    asked = wanted is not None and "base_layer" in wanted.split(".")
    bare = [name.removesuffix(".base_layer") for name in names]
    if not asked and all(name in changed for name in bare):
        raise _of_an_adapter(matrices.stored, sorted({*bare}))


def _declared_otherwise(matrices: Matrices, names: Sequence[str], wanted: Optional[str]) -> str:
    """What the settings say of a table's size if it has another; refused unless it was named."""
    known = any(names[0] in table for table in matrices.tables)
    if wanted is not None and not known:
        return ""
    sizes, dim = matrices.sizes, matrices.stored.config.dim
    rows, columns = matrices.shape(names[0])
    short = bool(sizes) and rows < sizes[0]
    narrow = dim is not None and columns < dim
    if not short and not narrow:
        return ""
    declared = f"{sizes[0]} words" if short else f"vectors of {dim} numbers"
    if wanted is None:
        raise CheckpointError(
            f"a table of {declared} in {matrices.stored.name}, as its settings say",
            f"{rows} x {columns} numbers in {names[0]}",
            "It may be one of several parts: give all of them, or choose it with --table NAME.",
        )
    return declared
