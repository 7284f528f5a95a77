"""Change the tables of stored models, which are not built: collapse, average and repair them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Type, Union

import torch
from torch import Tensor

from spectral_fairseq.checkpoints.allowed import pickle_by_name
from spectral_fairseq.checkpoints.opening import may_be_torch_file
from spectral_fairseq.checkpoints.readable import check_copies
from spectral_fairseq.checkpoints.reading import load_checkpoint, read_torch_file, tensors_of
from spectral_fairseq.checkpoints.settings import refuse_unequal
from spectral_fairseq.checkpoints.table_entries import (
    dense_form,
    entries_by_module,
    factored_kind,
    same_table,
    stored_form,
)
from spectral_fairseq.checkpoints.tables import Tables
from spectral_fairseq.embeddings import FactoredEmbedding
from spectral_fairseq.errors import (
    CHOOSE,
    CheckpointError,
    ConfigurationError,
    NoEquivalentError,
    UnsupportedError,
    check_enough,
    listed,
    needs_extra,
)
from spectral_fairseq.functional.cosines import mean_cosine
from spectral_fairseq.functional.row_blocks import check_finite, rows_outside
from spectral_fairseq.functional.row_norms import row_norms
from spectral_fairseq.functional.rows import new_rows, rows_to_repair

# What plain fairseq itself stores for a table and for an output layer.
PLAIN_ENTRIES = (frozenset({"weight"}), frozenset({"weight", "bias"}))


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
        product = next((dense for other, dense in products if same_table(entries, other)), None)
        if product is None:
            product = dense_form(kind, entries).float().contiguous()
            products.append((entries, product))
        collapsed[f"{name.removesuffix('.table')}.weight"] = product  # as a head holds it
    unknown = _not_plain(collapsed)
    if unknown:
        wanted = "embeddings and output layers that equal one matrix each"
        raise NoEquivalentError(wanted, f"the entries {', '.join(unknown)}")
    return collapsed


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


def with_tensors(checkpoint: Dict[str, Any], changed: Mapping[str, Tensor]) -> Dict[str, Any]:
    """A fairseq checkpoint with other tensors in its model, without what belongs to the old ones.

    That are the optimiser's moments and the moving average of the weights.
    """
    left = {**checkpoint, "model": {**checkpoint["model"], **changed}}
    left.pop("last_optimizer_state", None)
    for key in ("ema", "ema_fp32_params"):
        (left.get("extra_state") or {}).pop(key, None)
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
    sums = first.terms(first.tensors, paths[0])
    for path in paths[1:]:
        model = tensors_of(load_checkpoint(path, verify)["model"])
        first.check(model, path)
        for key, term in first.terms(model, path).items():
            sums[key] += term
    means = {key: total / len(paths) for key, total in sums.items()}
    return with_tensors(average, first.stored(means))


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
        # Modules with a factored table -> its kind; of several that share one, the first.
        self._kinds: Dict[str, Type[FactoredEmbedding]] = {}
        for module, entries in entries_by_module(tensors).items():
            kind = factored_kind(entries)
            if kind is not None:
                matrix = f"{module}.{kind.entries[0]}"
                if self._same[matrix] == matrix:
                    self._kinds[module] = kind

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
                "Average checkpoints of one training run, with one architecture and dictionary.",
            )
        for key, first in self._same.items():
            why = f"in {path}, since {self.path} shares them"
            refuse_unequal(model, [first, key], why, "Average checkpoints of one training.")

    def terms(self, model: Mapping[str, Tensor], path: Any) -> Dict[str, Tensor]:
        """What is summed over checkpoints, float64: floating tensors once each, tables dense."""
        terms = {
            # A copy: in float64 already, it would otherwise be added to in place.
            key: model[key].to(torch.float64, copy=True)
            for key, tensor in self.tensors.items()
            if tensor.is_floating_point() and self._same[key] == key
        }
        for module, kind in self._kinds.items():
            dense = dense_form(kind, {entry: model[f"{module}.{entry}"] for entry in kind.entries})
            check_finite(dense, f"{module} of {path}")  # others cannot be factored again
            terms[f"{module}.{kind.entries[0]}"] = dense  # in a factor's place
        return terms

    def stored(self, means: Dict[str, Tensor]) -> Dict[str, Tensor]:
        """The inverse of :meth:`terms`, in the types of this checkpoint."""
        for module, kind in self._kinds.items():
            entries = stored_form(kind, means[f"{module}.{kind.entries[0]}"])
            for entry in set(kind.entries) - kind.settings:  # settings are averaged as they are
                means[f"{module}.{entry}"] = entries[entry]
        like = self.tensors
        once = {key: mean.to(like[key].dtype).contiguous() for key, mean in means.items()}
        return {key: once.get(self._same[key], tensor) for key, tensor in like.items()}


# Repair of the tables of a stored model, which is read and written without building it.


# Two forms of a table are the same up to this share of its largest entry.
_SAME = 1e-6


class RepairedTable(NamedTuple):
    """What was done to one table.

    Attributes:
        names: of the modules that hold it.
        shape: (N, d).
        rows: that were changed.
        words: their words, where they are known.
        before: measures of the table as it was.
        after: the same of the table as it is now.
    """

    names: List[str]
    shape: Tuple[int, int]
    rows: List[int]
    words: List[str]
    before: Dict[str, float]
    after: Dict[str, float]


def repair_tables(
    opened: Tables, wanted: Optional[str] = None, **how: Any
) -> Tuple[List[RepairedTable], Dict[str, Tensor]]:
    """New tensors for the tables of a model.

    Args:
        opened: the model.
        wanted: name of the only table to repair; all tables of words if not given.
        **how: ``rows`` and ``initial_length`` as ``choices`` and ``initial_length`` of
            :func:`~spectral_fairseq.functional.rows.rows_to_repair`; ``fill``, ``noise`` and
            ``seed`` of :func:`~spectral_fairseq.functional.rows.new_rows`.

    Returns:
        What was done to each table, and the tensors that have changed by their names; tensors that
        are shared stay shared.

    Raises:
        UnsupportedError: no table of that name.
        CheckpointError: two copies of one table differ, and none was named.
        DataError: a table of whole numbers.
        ConfigurationError: an unknown choice.
    """
    if wanted is None:
        check_copies(opened)
    groups = [names for names in opened.groups if wanted is None or wanted in names]
    if not groups:
        there = listed([names[0] for names in opened.groups])
        named = f"named {wanted}" if wanted else "with a usual name"
        raise UnsupportedError(f"a table of words {named} in {opened.name}", there, CHOOSE)
    done, changed = [], {}
    for names in groups:
        table, tensors = _repaired(opened, names, **how)
        done.append(table)
        changed.update(tensors)
    # An output layer that is stored as d x N stays so.
    return done, {k: v.t().contiguous() if k in opened.turned else v for k, v in changed.items()}


def _repaired(
    opened: Tables,
    names: Sequence[str],
    rows: Sequence[str],
    initial_length: Optional[float],
    fill: str,
    noise: float,
    seed: int,
) -> Tuple[RepairedTable, Dict[str, Tensor]]:
    entries = opened.numbers_of(names[0])
    kind = factored_kind(entries)
    weight = dense_form(kind, entries) if kind else entries["weight"].detach()
    words, _ = opened.find_words(names[0], len(weight))
    uncounted = opened.uncounted if words is None else words.uncounted_rows()
    left_out = torch.tensor(sorted({row for row in uncounted if row < len(weight)})).long()
    places = rows_to_repair(weight, rows, left_out, initial_length)
    before = _measures(weight, left_out, places)
    after, tensors = before, {}
    if len(places):
        fixed = weight.clone()
        fixed[places] = new_rows(weight, places, fill, noise, left_out, seed).to(weight.dtype)
        after = _measures(fixed, left_out, places)
        stored = {"weight": fixed} if kind is None else _factors(kind, entries, fixed, places)
        for name in names:
            for entry, value in stored.items():
                tensors[name if name in opened.tensors else f"{name}.{entry}"] = value
    symbols = [] if words is None else [words.symbols[row] for row in places.tolist()]
    shape = (weight.size(0), weight.size(1))
    return RepairedTable(list(names), shape, places.tolist(), symbols, before, after), tensors


def _factors(
    kind: Any, entries: Mapping[str, Tensor], fixed: Tensor, places: Tensor
) -> Dict[str, Tensor]:
    """What a factored table stores for a matrix; the other rows' factors stay where they can."""
    made = stored_form(kind, fixed)
    made = {name: made[name].to(entries[name].dtype) for name in made if name not in kind.settings}
    changed = {name: value.clone() for name, value in entries.items()}
    for name, value in made.items():
        if value.dim() and len(value) == len(fixed):
            changed[name][places] = value[places]
    away = (dense_form(kind, changed) - fixed).abs().max()
    if away <= _SAME * fixed.abs().max():
        return changed
    return {**changed, **made}


def _measures(weight: Tensor, left_out: Tensor, places: Tensor) -> Dict[str, float]:
    norms = row_norms(weight.float())
    kept = rows_outside(len(weight), left_out)
    shortest = float(norms[kept].min()) if bool(kept.any()) else 0.0
    return {
        "mean length of these rows": float(norms[places].mean()) if len(places) else 0.0,
        "shortest row": shortest,
        "median length of all rows": float(norms[kept].median()),
        "longest row": float(norms[kept].max()),
        "mean cosine of all rows": mean_cosine(weight.float(), left_out),
    }


def write_folder(opened: Tables, changed: Mapping[str, Tensor], folder: Path) -> None:
    """Copy the folder of a model into an empty one, with the changed tensors in their files.

    Raises:
        UnsupportedError: weights in files of another format, or a table in parts.
    """
    assert opened.weights is not None
    source = opened.weights.parent
    for name in changed:
        holders = opened.files_of(name)
        if len(holders) > 1:
            raise UnsupportedError(
                f"{name} in one file of {source}",
                f"parts of it in {listed([path.name for path in holders])}",
                "Put the parts together first.",
            )
    files = {name: opened.files_of(name)[0] for name in changed}
    for path in sorted(source.iterdir()):
        if os.path.isfile(path):
            in_file = {name: changed[name] for name, file in files.items() if file == path}
            if in_file:
                write_weights(path, in_file, folder / path.name)
            else:
                shutil.copyfile(path, folder / path.name)


def write_weights(source: Path, changed: Mapping[str, Tensor], target: Path) -> None:
    """Write a file of weights anew with other tensors in it.

    Raises:
        UnsupportedError: it is neither of safetensors nor a state dict that torch saved.
    """
    if source.suffix == ".safetensors":
        _write_safetensors(source, changed, target)
        return
    state, _ = read_torch_file(source) if may_be_torch_file(source) else (None, 0)
    if not isinstance(state, dict) or not all(isinstance(state.get(k), Tensor) for k in changed):
        raise UnsupportedError(
            "a fairseq checkpoint, a file of safetensors, or a state dict that torch saved",
            f"{source}",
            "Load the model, call repair_ of spectral_fairseq.training, and save it again.",
        )
    state.update(changed)
    torch.save(state, target, pickle_module=pickle_by_name())


def _write_safetensors(source: Path, changed: Mapping[str, Tensor], target: Path) -> None:
    with needs_extra("models", "to write safetensors"):
        import safetensors
        import safetensors.torch
    with safetensors.safe_open(str(source), framework="pt", device="cpu") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    tensors.update((name, value.clone().contiguous()) for name, value in changed.items())
    safetensors.torch.save_file(tensors, str(target), metadata=metadata)
