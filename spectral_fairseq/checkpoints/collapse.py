"""Checkpoints' factored tables as the plain matrices that they stand for, and back.

Nothing is built but the tables: a checkpoint's ``model`` entry (name -> tensor) goes in, and one
comes out.
"""

from __future__ import annotations

from typing import Callable, Dict, FrozenSet, List, Mapping, Tuple

import torch
from torch import Tensor

from spectral_fairseq.embeddings.svd import SVDEmbedding
from spectral_fairseq.embeddings.weight_norm import SHORTEST, WeightNormEmbedding
from spectral_fairseq.errors import UnsupportedError

# Every dictionary of fairseq starts <s>, <pad>, </s>, <unk>.
PADDING_ROW = 1

SVD_ENTRIES = frozenset({"U", "sigma", "V", "scale", "initial_norm"})
WEIGHT_NORM_ENTRIES = frozenset({"g", "v"})


def dense_svd_table(entries: Mapping[str, Tensor]) -> Tensor:
    """W of a stored SVD table, float64, shape (N, d).

    Args:
        entries: the table's part of a checkpoint, U (N, d), sigma (d,), V (d, d) and its two
            scalars, of any floating type.
    """
    table = _empty_svd_table(entries["U"])
    table.load_state_dict(dict(entries))
    return table.weight.detach()


def svd_entries(weight: Tensor) -> Dict[str, Tensor]:
    """What an SVD table that equals ``weight``, shape (N, d), stores; float64.

    A checkpoint does not say which rows are made-up words, of which there are at most a few, so
    U is orthonormal over all rows but padding; the product is the same.
    """
    return _empty_svd_table(weight).factor(weight.double())


def _empty_svd_table(like: Tensor) -> SVDEmbedding:
    with torch.random.fork_rng(devices=[]):
        return SVDEmbedding(like.size(0), like.size(1), PADDING_ROW).double()


def dense_weight_norm_table(entries: Mapping[str, Tensor]) -> Tensor:
    """W of a stored weight-norm table, float64, shape (N, d).

    Args:
        entries: g (N,) and v (N, d), of any floating type.
    """
    v = entries["v"].double()
    lengths = torch.linalg.vector_norm(v, dim=1, keepdim=True)
    return v * (entries["g"].double().unsqueeze(1) / lengths.clamp(min=SHORTEST))


# Entries under one name -> the matrix that they stand for; one line for each kind of table.
DENSE_FORMS: Dict[FrozenSet[str], Callable[[Mapping[str, Tensor]], Tensor]] = {
    SVD_ENTRIES: dense_svd_table,
    WEIGHT_NORM_ENTRIES: dense_weight_norm_table,
}


def weight_norm_entries(weight: Tensor) -> Dict[str, Tensor]:
    """What a weight-norm table that equals ``weight``, shape (N, d), stores; float64."""
    dense = weight.double()
    with torch.random.fork_rng(devices=[]):
        table = WeightNormEmbedding(dense.size(0), dense.size(1), PADDING_ROW).double()
    return table.factor(dense)


# The inverse: entries -> (the one of shape (N, d), what stores a matrix in this form).
FACTORED_FORMS: Dict[FrozenSet[str], Tuple[str, Callable[[Tensor], Dict[str, Tensor]]]] = {
    SVD_ENTRIES: ("U", svd_entries),
    WEIGHT_NORM_ENTRIES: ("v", weight_norm_entries),
}

# What plain fairseq itself stores for a table and for an output layer.
PLAIN_ENTRIES = (frozenset({"weight"}), frozenset({"weight", "bias"}))


def entries_by_module(model: Mapping[str, Tensor]) -> Dict[str, Dict[str, Tensor]]:
    """Group a checkpoint's tensors: module name -> entry name -> tensor."""
    modules: Dict[str, Dict[str, Tensor]] = {}
    for key, tensor in model.items():
        module, _, entry = key.rpartition(".")
        modules.setdefault(module, {})[entry] = tensor
    return modules


def plain_name(module: str) -> str:
    """The key under which plain fairseq keeps the table that we keep in ``module``."""
    suffix = ".table"  # a head holds its table by this name, a Linear is its own
    return (module[: -len(suffix)] if module.endswith(suffix) else module) + ".weight"


def collapse_tables(model: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """Replace every factored table by one matrix under plain fairseq's name.

    Args:
        model: a checkpoint's ``model``.

    Returns:
        A new mapping. Collapsed tables are float32 even where ``model`` is float16: rounding the
        product once more would change the logits. Tables that are shared stay shared, and all
        other tensors are passed on as they are.

    Raises:
        UnsupportedError: an embedding or output layer stored in a way that plain fairseq does
            not have.
    """
    collapsed: Dict[str, Tensor] = {}
    products: List[Tuple[Mapping[str, Tensor], Tensor]] = []
    for name, entries in entries_by_module(model).items():
        dense_form = DENSE_FORMS.get(frozenset(entries))
        if dense_form is None:
            for entry, tensor in entries.items():
                collapsed[f"{name}.{entry}" if name else entry] = tensor
            continue
        # fairseq copies a shared table once for each of its names when it trains on a GPU.
        product = next((product for other, product in products if _equal(entries, other)), None)
        if product is None:
            product = dense_form(entries).float().contiguous()
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
