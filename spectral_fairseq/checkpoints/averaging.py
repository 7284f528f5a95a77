"""Average several checkpoints: the embedding tables themselves, not their factors.

U, sigma and V are determined only together. The average of two U times the average of two sigma
is not the average of the two tables, and it changes with rotations of U and V that leave the
tables as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple, Type, Union

import torch
from torch import Tensor

from spectral_fairseq.checkpoints.collapse import (
    dense_form,
    entries_by_module,
    factored_kind,
    stored_form,
)
from spectral_fairseq.checkpoints.reading import load_checkpoint, tensors_of
from spectral_fairseq.embeddings import FactoredEmbedding
from spectral_fairseq.errors import CheckpointError, ConfigurationError

# The optimiser's moments and the moving average belong to the factors of one checkpoint.
LEFT_OUT = ("last_optimizer_state",)
LEFT_OUT_OF_EXTRA_STATE = ("ema", "ema_fp32_params")


def average_checkpoints(paths: Sequence[Union[str, Path]], verify: bool = True) -> Dict[str, Any]:
    """The average of checkpoints of one model; only one of them is in memory at a time.

    Args:
        paths: at least one checkpoint.
        verify: as of :func:`~spectral_fairseq.checkpoints.reading.load_checkpoint`.

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
