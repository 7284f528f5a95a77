"""A table of word vectors, read from what a model stores of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Iterable, Mapping, Optional, Type

import torch
from torch import Tensor

from spectral_fairseq.checkpoints.tensors import FLOATING
from spectral_fairseq.embeddings import PlainEmbedding, Table
from spectral_fairseq.embeddings.entries import dense_form
from spectral_fairseq.errors import DataError
from spectral_fairseq.formats.matrices import dtype_name
from spectral_fairseq.formats.which_table import Choice
from spectral_fairseq.functional.row_blocks import check_finite, rows_outside


@dataclass
class StoredTable:
    """A table of word vectors, without the rows that stand for no word.

    Attributes:
        name: module that holds it in the checkpoint.
        kind: one of the kinds of :data:`spectral_fairseq.embeddings.TABLES`.
        weight: W, shape (N, d): the rows that count. A plain matrix keeps its type, and its place
            in the file where no row is left out in between; a product of factors is float32
            (float64 if they are).
        rows: the row in the checkpoint of each row of ``weight``, shape (N,).
        dtype: in which it is stored.
        orthogonality: distances of stored factors from orthonormal columns, by measure.
        stored_sigma: singular values as learned, largest first, shape (d,), if they are stored.
        initial_norm: the norm that an automatic prior refers to, if it is stored.
    """

    name: str
    kind: str
    weight: Tensor
    rows: Tensor
    dtype: str
    orthogonality: Dict[str, float] = field(default_factory=dict)
    stored_sigma: Optional[Tensor] = None
    initial_norm: Optional[float] = None


def read_table(choice: Choice, excluded: Iterable[int]) -> StoredTable:
    """Read one table.

    Args:
        choice: of the table.
        excluded: rows that stand for no word.

    Raises:
        DataError: whole numbers, fewer words than dimensions, or entries that are not finite.
    """
    kind, name = choice.kind, f"{choice.names[0]} of {choice.model.name}"
    main = choice.entries[kind.entries[0]]
    if main.dtype not in FLOATING:
        raise DataError(
            f"floating-point numbers of 16, 32 or 64 bits in {name}",
            dtype_name(main),
            "Take the model as it was before it was quantized, or choose with --table NAME.",
        )
    count, dim = choice.shape
    uncounted = sorted({row for row in excluded if row < count})
    left_out = torch.tensor(uncounted, dtype=torch.long)
    words = count - len(left_out)
    if words < dim:
        raise DataError(
            f"at least as many words as dimensions (N >= d) in {name}",
            f"N = {words} words, padding and made-up rows left out, and d = {dim}",
            "If the matrix is not a table of words, choose another with --table NAME.",
        )
    rows = rows_outside(count, left_out).nonzero().squeeze(1)
    entries = {entry: value.cpu() for entry, value in choice.entries.items()}
    weight = _rows_of(kind, entries, rows)
    check_finite(weight, name)
    return StoredTable(
        name=choice.names[0],
        kind=kind.kind,
        weight=weight,
        rows=rows,
        dtype=dtype_name(main),
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
