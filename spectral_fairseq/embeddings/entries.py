"""What checkpoints store of a table, the matrix that it stands for, and the way back."""

from __future__ import annotations

import math
from typing import Dict, Mapping, Optional, Type

import torch
from torch import Tensor

from spectral_fairseq.embeddings import TABLES, FactoredEmbedding, PlainEmbedding, Table
from spectral_fairseq.errors import CheckpointError, NotFairseqError
from spectral_fairseq.functional.row_blocks import BLOCK_ROWS, same_values

# Every dictionary of fairseq starts <s>, <pad>, </s>, <unk>.
PADDING_ROW = 1

FACTORED_KINDS = {
    frozenset(kind.entries): kind for kind in TABLES if issubclass(kind, FactoredEmbedding)
}
"""The factored tables by the names of what they store."""


def entries_by_module(model: Mapping[str, Tensor]) -> Dict[str, Dict[str, Tensor]]:
    """Group a checkpoint's tensors: module name -> entry name -> tensor."""
    modules: Dict[str, Dict[str, Tensor]] = {}
    for key, tensor in model.items():
        module, _, entry = key.rpartition(".")
        modules.setdefault(module, {})[entry] = tensor
    return modules


def factored_kind(entries: Mapping[str, Tensor]) -> Optional[Type[FactoredEmbedding]]:
    """The kind of factored table that stores exactly these entries, if there is one."""
    kind = FACTORED_KINDS.get(frozenset(entries))
    return kind if kind is not None and entries[kind.entries[0]].dim() == 2 else None


def kind_of(entries: Mapping[str, Tensor]) -> Type[Table]:
    """The kind of table that a module stores, if it stores one."""
    return factored_kind(entries) or PlainEmbedding


def same_table(table: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two modules store one table, by what they store.

    Training on a GPU, and tools that rewrite checkpoints, store shared tables apart.
    """
    kind = kind_of(table)
    return kind is kind_of(other) and all(
        same_values(table[entry], other[entry]) for entry in kind.entries
    )


def dense_form(
    kind: Type[Table],
    entries: Mapping[str, Tensor],
    rows: Optional[Tensor] = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The matrix of a stored table, computed block by block.

    Args:
        kind: of table.
        entries: what it stores, of any floating type.
        rows: which rows, shape (n,); all if not given.
        dtype: of the arithmetic and the result.

    Returns:
        Shape (n, d).

    Raises:
        CheckpointError: factors whose shapes do not fit together, or an entry that should be one
            number and is not.
    """
    resolved = _checked(kind, entries)
    count, dim = kind.stored_shape(entries)
    rows = torch.arange(count) if rows is None else rows
    dense = torch.empty(len(rows), dim, dtype=dtype)
    for chosen, block in zip(rows.split(BLOCK_ROWS), dense.split(BLOCK_ROWS)):
        block.copy_(kind.dense_rows(resolved, chosen, dtype))
    return dense


def _checked(kind: Type[Table], entries: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Resolve entries, and compute the last row alone, to see whether the shapes fit."""
    factors = (entries[name] for name in kind.entries if name not in kind.numbers)
    try:
        count, dim = kind.stored_shape(entries)
        last = torch.arange(max(0, count - 1), count)
        resolved = kind.resolved(entries)
        fit = kind.dense_rows(resolved, last, torch.float64).shape == (len(last), dim) and dim > 0
        fit = fit and all(len(factor) in (count, dim) for factor in factors if factor.dim() == 1)
    except (IndexError, RuntimeError):
        fit = False
    if not fit:
        shapes = (f"{name} {tuple(entries[name].shape)}" for name in kind.entries)
        raise NotFairseqError(
            f"factors of a {kind.kind} table that fit together", ", ".join(shapes)
        )
    for name in kind.numbers:
        value = entries[name]
        if value.dim() or not 0 <= float(value) < math.inf:
            raise NotFairseqError(
                f"one finite number of at least 0 as the {name} of a {kind.kind} table",
                f"a tensor of shape {tuple(value.shape)}" if value.dim() else f"{float(value)}",
            )
    return resolved


def stored_form(
    kind: Type[Table], weight: Tensor, like: Mapping[str, Tensor], name: str
) -> Dict[str, Tensor]:
    """What a table of a kind that equals ``weight``, shape (N, d), stores; float64.

    A checkpoint does not say which rows are made-up words, of which there are at most a few, so U
    of an SVD table becomes orthonormal over all rows but padding. The product is the same.

    Args:
        kind: of table.
        weight: W.
        like: the entries that are replaced, of the same shapes.
        name: stands for the matrix in the message.

    Raises:
        CheckpointError: a kind that is not exact and only comes near, or that does not say how a
            table of these shapes is made.
    """
    with torch.random.fork_rng(devices=[]):
        table = kind.rebuilt(like, PADDING_ROW).double()
    made = table.factor_exactly(weight.double(), name)
    for entry, value in made.items():
        if value.shape != like[entry].shape:
            raise CheckpointError(
                f"{entry} of shape {tuple(like[entry].shape)}, as stored, for {name}",
                f"{tuple(value.shape)}",
                f"Declare {kind.__name__}.rebuilt, which makes a table of the same options.",
            )
    return made
