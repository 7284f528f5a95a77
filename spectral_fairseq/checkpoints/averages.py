"""Average several checkpoints: the embedding tables themselves, not their factors.

U, sigma and V are determined only together. The average of two U times the average of two sigma
is not the average of the two tables, and it changes with rotations of U and V that leave the
tables as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Mapping, Sequence, Set, Tuple, Type, Union

import torch
from torch import Tensor

from spectral_fairseq.checkpoints.reading import load_checkpoint, tensors_of
from spectral_fairseq.checkpoints.settings import checkpoint_settings
from spectral_fairseq.checkpoints.tensors import refuse_unequal
from spectral_fairseq.embeddings import FactoredEmbedding
from spectral_fairseq.embeddings.entries import (
    dense_form,
    entries_by_module,
    factored_kind,
    stored_form,
)
from spectral_fairseq.errors import (
    CheckpointError,
    ConfigurationError,
    check_enough,
    listed,
)
from spectral_fairseq.functional.row_blocks import check_finite

# What a model computes of its tensors, where these do not show it: two mixtures have the same ones.
# Flag -> setting, and its value for an output layer of fairseq.
_COMPUTED = {
    "--output-head": ("output_head", "softmax"),
    "--logit-softcap": ("logit_softcap", "none"),
}
_OF_ONE_TRAINING = "Average checkpoints of one training run, with one architecture and dictionary."


def with_tensors(checkpoint: Dict[str, Any], changed: Mapping[str, Tensor]) -> Dict[str, Any]:
    """A fairseq checkpoint with other tensors in its model, without what belongs to the old ones.

    The optimiser's moments and the moving average of the weights are left out.
    """
    left = {**checkpoint, "model": {**checkpoint["model"], **changed}}
    left.pop("last_optimizer_state", None)
    averages = ("ema", "ema_fp32_params")
    extra = left.get("extra_state")
    if extra:
        left["extra_state"] = {key: extra[key] for key in extra if key not in averages}
    return left


def average_checkpoints(paths: Sequence[Union[str, Path]], verify: bool = True) -> Dict[str, Any]:
    """The average of checkpoints of one model; only one of them is in memory at a time.

    Returns:
        A checkpoint with the settings of the first path and no optimiser state. Averages are
        taken in float64 and stored in the first checkpoint's types. Tensors that are not floating
        point come from the first checkpoint, and shared tensors stay shared.

    Raises:
        CheckpointError: unreadable, or not of one model.
        DataError: a factored table that is not finite.
        ConfigurationError: no path is given.
    """
    check_enough(len(paths), 1, "checkpoint to average", "Name some.", ConfigurationError)
    average = load_checkpoint(paths[0], verify)
    first = _First(tensors_of(average["model"]), paths[0])
    computed = _computed(average)
    sums: Dict[str, Tensor] = {}
    first.add(sums, first.tensors, paths[0])
    for path in paths[1:]:
        checkpoint = load_checkpoint(path, verify)
        model, other = tensors_of(checkpoint["model"]), _computed(checkpoint)
        first.check(model, path)
        if other != computed:
            wanted = f"{path} of a model with {computed}, as {paths[0]} is"
            raise CheckpointError(wanted, other, _OF_ONE_TRAINING)
        first.add(sums, model, path)
    return with_tensors(average, first.stored(sums, len(paths)))


def _computed(checkpoint: Mapping[str, Any]) -> str:
    """What a model computes of its tensors, in flags."""
    settings = checkpoint_settings(checkpoint, "model")
    flags = {flag: settings.get(name) or usual for flag, (name, usual) in _COMPUTED.items()}
    return " ".join(f"{flag} {value}" for flag, value in flags.items())


class _First:
    """The first of several checkpoints, which says what is shared and which entries are factors."""

    def __init__(self, tensors: Mapping[str, Tensor], path: Any) -> None:
        self.tensors, self.path = tensors, path
        # Each key -> the first key that is the same tensor in memory, often the key itself.
        self._same: Dict[str, str] = {}
        places: Dict[Tuple[object, ...], str] = {}
        for key, tensor in tensors.items():
            place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            self._same[key] = places.setdefault(place, key) if tensor.numel() else key
        # The first factor of each table -> its module and kind; of several that share one, the
        # first. The matrix is summed in the factor's place, and the other factors are not.
        self._tables: Dict[str, Tuple[str, Type[FactoredEmbedding]]] = {}
        self._not_summed: Set[str] = set()
        for module, entries in entries_by_module(tensors).items():
            kind = factored_kind(entries)
            if kind is not None:
                matrix = f"{module}.{kind.entries[0]}"
                if self._same[matrix] == matrix:
                    self._tables[matrix] = module, kind
                    factors = set(kind.entries[1:]) - kind.settings  # settings are averaged
                    self._not_summed.update(f"{module}.{entry}" for entry in factors)

    def check(self, model: Mapping[str, Tensor], path: Any) -> None:
        """Refuse a checkpoint of another model, or of one that shares less."""
        like = self.tensors
        differences = [f"{key} only in one of them" for key in sorted(set(like) ^ set(model))]
        differences += [
            f"{key} of shape {tuple(like[key].shape)} and {tuple(model[key].shape)}"
            for key in like
            if key in model and like[key].shape != model[key].shape
        ]
        if differences:
            raise CheckpointError(
                f"{path} to hold the same tensors as {self.path}",
                f"{len(differences)} differences: {listed(differences, 3, '; ')}",
                _OF_ONE_TRAINING,
            )
        for key, first in self._same.items():
            why = f"in {path}, since {self.path} shares them"
            refuse_unequal(model, [first, key], why, "Average checkpoints of one training.")

    def add(self, sums: Dict[str, Tensor], model: Mapping[str, Tensor], path: Any) -> None:
        """Add a model to sums in float64, in place: floating tensors once each, tables dense."""
        for key, tensor in self.tensors.items():
            if not tensor.is_floating_point() or self._same[key] != key or key in self._not_summed:
                continue
            term = model[key]
            if key in self._tables:
                module, kind = self._tables[key]
                term = dense_form(
                    kind, {entry: model[f"{module}.{entry}"] for entry in kind.entries}
                )
                check_finite(term, f"{module} of {path}")  # others cannot be factored again
            if key in sums:
                sums[key].add_(term.to(torch.float64))
            else:  # a copy: in float64 already, it would otherwise be added to in place
                sums[key] = term.to(torch.float64, copy=True)

    def stored(self, sums: Dict[str, Tensor], count: int) -> Dict[str, Tensor]:
        """The averages of ``count`` models in the form and types of this one; empties the sums."""
        like = self.tensors
        once: Dict[str, Tensor] = {}
        for key in list(sums):
            means = {key: sums.pop(key).div_(count)}
            if key in self._tables:
                module, kind = self._tables[key]
                stored = {entry: like[f"{module}.{entry}"] for entry in kind.entries}
                made = stored_form(kind, means[key], stored, f"the average of {module}")
                factors = set(kind.entries) - kind.settings
                means = {f"{module}.{entry}": made[entry] for entry in factors}
            once.update(
                (name, mean.to(like[name].dtype).contiguous()) for name, mean in means.items()
            )
        return {key: once.get(self._same[key], tensor) for key, tensor in like.items()}
