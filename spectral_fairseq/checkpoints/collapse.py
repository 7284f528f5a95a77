"""Turn the factored tables of checkpoints into the matrices that they stand for, and back.

The functions take a checkpoint's ``model`` entry (name -> tensor) and return a new one. They build
no model.
"""

from __future__ import annotations

import math
from typing import Dict, List, Mapping, Optional, Tuple, Type

import torch
from torch import Tensor

from spectral_fairseq.embeddings import TABLES, FactoredEmbedding, Table
from spectral_fairseq.errors import CheckpointError, UnsupportedError

# Every dictionary of fairseq starts <s>, <pad>, </s>, <unk>.
PADDING_ROW = 1

FACTORED_KINDS = {
    frozenset(kind.entries): kind for kind in TABLES if issubclass(kind, FactoredEmbedding)
}
"""The factored tables by the names of what they store."""

# What plain fairseq itself stores for a table and for an output layer.
PLAIN_ENTRIES = (frozenset({"weight"}), frozenset({"weight", "bias"}))

_BLOCK_ROWS = 16384


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
    count, dim = entries[kind.entries[0]].shape
    rows = torch.arange(count) if rows is None else rows
    _check_factors(kind, entries, dim)
    dense = torch.empty(len(rows), dim, dtype=dtype)
    for chosen, block in zip(rows.split(_BLOCK_ROWS), dense.split(_BLOCK_ROWS)):
        block.copy_(kind.dense_rows(entries, chosen, dtype))
    return dense


def _check_factors(kind: Type[Table], entries: Mapping[str, Tensor], dim: int) -> None:
    """Compute no row, to see whether the shapes fit."""
    try:
        none = kind.dense_rows(entries, torch.zeros(0, dtype=torch.long), torch.float64)
        fit = none.shape == (0, dim)
    except (IndexError, RuntimeError):
        fit = False
    if not fit:
        shapes = (f"{name} {tuple(entries[name].shape)}" for name in kind.entries)
        raise CheckpointError(
            f"factors of a {kind.kind} table that fit together",
            ", ".join(shapes),
            "Give a checkpoint saved by fairseq-train.",
        )
    for name in kind.numbers:
        value = entries[name]
        if value.dim() or not 0 <= float(value) < math.inf:
            raise CheckpointError(
                f"one finite number of at least 0 as the {name} of a {kind.kind} table",
                f"a tensor of shape {tuple(value.shape)}" if value.dim() else f"{float(value)}",
                "Give a checkpoint saved by fairseq-train.",
            )


def stored_form(kind: Type[Table], weight: Tensor) -> Dict[str, Tensor]:
    """What a table of a kind that equals ``weight``, shape (N, d), stores; float64.

    A checkpoint does not say which rows are made-up words, of which there are at most a few, so U
    of an SVD table becomes orthonormal over all rows but padding. The product is the same.
    """
    with torch.random.fork_rng(devices=[]):
        table = kind(*weight.shape, PADDING_ROW).double()
    return table.factor(weight.double())


def plain_name(module: str) -> str:
    """The key under which plain fairseq keeps the table that this package keeps in ``module``."""
    suffix = ".table"  # where a head holds its table; a Linear is its own
    return (module[: -len(suffix)] if module.endswith(suffix) else module) + ".weight"


def collapse_tables(model: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """Replace every factored table by one matrix under plain fairseq's name.

    Args:
        model: a checkpoint's ``model``.

    Returns:
        A new mapping. Collapsed tables are float32 even if ``model`` is float16: rounding the
        product once more would change the logits. Tables that are shared stay shared, and all
        other tensors stay as they are.

    Raises:
        UnsupportedError: an embedding or output layer stored in a way that plain fairseq does
            not have.
    """
    collapsed: Dict[str, Tensor] = {}
    products: List[Tuple[Mapping[str, Tensor], Tensor]] = []
    for name, entries in entries_by_module(model).items():
        kind = factored_kind(entries)
        if kind is None:
            for entry, tensor in entries.items():
                collapsed[f"{name}.{entry}" if name else entry] = tensor
            continue
        # fairseq copies a shared table once for each of its names when it trains on a GPU.
        product = next((product for other, product in products if _equal(entries, other)), None)
        if product is None:
            product = dense_form(kind, entries).float().contiguous()
            products.append((entries, product))
        collapsed[plain_name(name)] = product
    unknown = _not_plain(collapsed)
    if unknown:
        raise UnsupportedError(
            "embeddings and output layers that equal one matrix each",
            f"the entries {', '.join(unknown)}",
            "This model has no plain equivalent: keep using it with --user-dir.",
        )
    return collapsed


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[entry]) for entry, tensor in one.items()
    )


def _not_plain(model: Mapping[str, Tensor]) -> List[str]:
    places = ("embed_tokens", "output_projection")
    return [
        f"{module}.{entry}"
        for module, entries in entries_by_module(model).items()
        if any(place in module.split(".") for place in places)
        and frozenset(entries) not in PLAIN_ENTRIES
        for entry in entries
    ]
