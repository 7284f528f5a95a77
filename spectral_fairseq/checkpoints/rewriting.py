"""Turn the factored tables of checkpoints into the matrices that they stand for, and back.

The functions take a checkpoint's ``model`` entry (name -> tensor) and return a new one. They build
no model.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Type, Union

import torch
from torch import Tensor

from spectral_fairseq.checkpoints.reading import load_checkpoint, tensors_of
from spectral_fairseq.embeddings import TABLES, FactoredEmbedding, Table
from spectral_fairseq.errors import CheckpointError, ConfigurationError, UnsupportedError

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


# Average several checkpoints: the embedding tables themselves, not their factors.
#
# U, sigma and V are determined only together. The average of two U times the average of two sigma
# is not the average of the two tables, and it changes with rotations of U and V that leave the
# tables as they are.


# The optimiser's moments and the moving average belong to the factors of one checkpoint.
LEFT_OUT = ("last_optimizer_state",)
LEFT_OUT_OF_EXTRA_STATE = ("ema", "ema_fp32_params")


def average_checkpoints(paths: Sequence[Union[str, Path]], verify: bool = True) -> Dict[str, Any]:
    """The average of checkpoints of one model; only one of them is in memory at a time.

    Returns:
        A checkpoint with the settings of the first path and no optimiser state. Averages are
        taken in float64 and stored in the first checkpoint's types. Tensors that are not floating
        point come from the first checkpoint, and shared tensors stay shared.

    Raises:
        CheckpointError: unreadable, not of one model, or with a factored table that is not finite.
        ConfigurationError: no path is given.
    """
    if not paths:
        raise ConfigurationError("at least one checkpoint to average", "none", "Name some.")
    average = load_checkpoint(paths[0], verify)
    like = tensors_of(average["model"])
    sums = _terms(like)
    _check_finite(sums, like, paths[0])
    for path in paths[1:]:
        model = tensors_of(load_checkpoint(path, verify)["model"])
        _check_same_model(like, model, paths[0], path)
        _check_shared(_aliases(like), model, paths[0], path)
        terms = _terms(model, like)
        _check_finite(terms, like, path)
        for key, term in terms.items():
            sums[key] += term
    means = {key: total / len(paths) for key, total in sums.items()}
    average["model"] = {**average["model"], **_stored(means, like)}
    for key in LEFT_OUT:
        average.pop(key, None)
    for key in LEFT_OUT_OF_EXTRA_STATE:
        (average.get("extra_state") or {}).pop(key, None)
    return average


def _aliases(model: Mapping[str, Tensor]) -> Dict[str, str]:
    """Each key -> the first key that is the same tensor in memory, often the key itself."""
    first: Dict[Tuple[object, ...], str] = {}
    found = {}
    for key, tensor in model.items():
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        found[key] = first.setdefault(place, key) if tensor.numel() else key
    return found


def _tables(model: Mapping[str, Tensor]) -> Dict[str, Type[FactoredEmbedding]]:
    """Modules that hold a factored table -> its kind; of several that share one, the first."""
    same = _aliases(model)
    found = {}
    for module, entries in entries_by_module(model).items():
        kind = factored_kind(entries)
        if kind is not None:
            matrix = f"{module}.{kind.entries[0]}"
            if same[matrix] == matrix:
                found[module] = kind
    return found


def _terms(
    model: Mapping[str, Tensor], like: Optional[Mapping[str, Tensor]] = None
) -> Dict[str, Tensor]:
    """What is summed over checkpoints, float64: floating tensors once each, tables dense.

    Args:
        model: one checkpoint's tensors.
        like: the tensors that say what is shared; ``model`` itself if not given.
    """
    like = model if like is None else like
    same = _aliases(like)
    terms = {
        # A copy: in float64 already, it would otherwise be added to in place.
        key: model[key].to(torch.float64, copy=True)
        for key in like
        if like[key].is_floating_point() and same[key] == key
    }
    for module, kind in _tables(like).items():
        entries = {entry: model[f"{module}.{entry}"] for entry in kind.entries}
        terms[f"{module}.{kind.entries[0]}"] = dense_form(kind, entries)  # in a factor's place
    return terms


def _stored(means: Dict[str, Tensor], like: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """The inverse of :func:`_terms`, in the types of ``like``."""
    for module, kind in _tables(like).items():
        entries = stored_form(kind, means[f"{module}.{kind.entries[0]}"])
        for entry in set(kind.entries) - kind.settings:  # settings are averaged as they are
            means[f"{module}.{entry}"] = entries[entry]
    once = {key: mean.to(like[key].dtype).contiguous() for key, mean in means.items()}
    same = _aliases(like)
    return {key: once.get(same[key], tensor) for key, tensor in like.items()}


def _check_finite(terms: Mapping[str, Tensor], like: Mapping[str, Tensor], path: Any) -> None:
    """Refuse tables that cannot be factored again."""
    for module, kind in _tables(like).items():
        if not torch.isfinite(terms[f"{module}.{kind.entries[0]}"]).all():
            raise CheckpointError(
                f"finite numbers in {module} of {path}",
                "infinity or NaN",
                "Training diverged, or the file is damaged: average earlier checkpoints.",
            )


def _check_shared(
    same: Mapping[str, str], model: Mapping[str, Tensor], one_path: Any, path: Any
) -> None:
    """Refuse a model in which tensors differ that are one in the first checkpoint."""
    for key, first in same.items():
        if first != key and not torch.equal(model[key].nan_to_num(), model[first].nan_to_num()):
            raise CheckpointError(
                f"{key} to equal {first} in {path}, since {one_path} shares them",
                "different values",
                "Average checkpoints of one training.",
            )


def _check_same_model(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], one_path: Any, other_path: Any
) -> None:
    differences = [f"{key} only in one of them" for key in sorted(set(one) ^ set(other))]
    differences += [
        f"{key} of shape {tuple(one[key].shape)} and {tuple(other[key].shape)}"
        for key in one
        if key in other and one[key].shape != other[key].shape
    ]
    if differences:
        shown = "; ".join(differences[:3]) + ("; ..." if len(differences) > 3 else "")
        raise CheckpointError(
            f"{other_path} to hold the same tensors as {one_path}",
            f"{len(differences)} differences: {shown}",
            "Average checkpoints of one training run, with one architecture and dictionary.",
        )
