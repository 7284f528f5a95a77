"""Repair of the tables of a stored model, which is read and written without building it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.checkpoints.opened import OpenedModel, check_copies
from spectral_fairseq.checkpoints.rewriting import (
    dense_form,
    entries_by_module,
    factored_kind,
    stored_form,
)
from spectral_fairseq.checkpoints.tables import find_tables
from spectral_fairseq.errors import UnsupportedError, needs_extra
from spectral_fairseq.functional.cosines import mean_cosine
from spectral_fairseq.functional.products import row_norms
from spectral_fairseq.functional.repair import new_rows, rows_to_repair

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
    opened: OpenedModel, wanted: Optional[str] = None, **how: Any
) -> Tuple[List[RepairedTable], Dict[str, Tensor]]:
    """New tensors for the tables of a model.

    Args:
        opened: the model.
        wanted: name of the only table to repair; all tables of words if not given.
        **how: ``rows`` and ``initial_length`` as ``choices`` and ``initial_length`` of
            :func:`~spectral_fairseq.functional.repair.rows_to_repair`; ``fill``, ``noise`` and
            ``seed`` of :func:`~spectral_fairseq.functional.repair.new_rows`.

    Returns:
        What was done to each table, and the tensors that have changed by their names; tensors that
        are shared stay shared.

    Raises:
        UnsupportedError: no table of that name.
        CheckpointError: two copies of one table differ, and none was named.
        ConfigurationError: an unknown choice.
    """
    model = opened.tensors
    found = find_tables(model, opened.vocabulary_sizes())
    if wanted is None:
        check_copies(opened, list(found.values()))
    groups = [names for names in found.values() if wanted is None or wanted in names]
    if not groups:
        raise UnsupportedError(
            f"a table of words in {opened.name}" + (f" named {wanted}" if wanted else ""),
            ", ".join(found) or "none",
            "Choose one with --table NAME.",
        )
    done, changed = [], {}
    for names in groups:
        table, tensors = _repaired(opened, names, **how)
        done.append(table)
        changed.update(tensors)
    # An output layer that is stored as d x N stays so.
    return done, {k: v.t().contiguous() if k in opened.turned else v for k, v in changed.items()}


def _repaired(
    opened: OpenedModel,
    names: Sequence[str],
    rows: Sequence[str],
    initial_length: Optional[float],
    fill: str,
    noise: float,
    seed: int,
) -> Tuple[RepairedTable, Dict[str, Tensor]]:
    model = opened.tensors
    bare = names[0] in model
    entries = {"weight": model[names[0]]} if bare else entries_by_module(model)[names[0]]
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
                tensors[name if name in model else f"{name}.{entry}"] = value
    symbols = [] if words is None else [words.symbols[row] for row in places.tolist()]
    shape = (weight.size(0), weight.size(1))
    return RepairedTable(list(names), shape, places.tolist(), symbols, before, after), tensors


def _factors(
    kind: Any, entries: Mapping[str, Tensor], fixed: Tensor, places: Tensor
) -> Dict[str, Tensor]:
    """What a factored table stores for a matrix; the other rows' factors stay where they can."""
    made = stored_form(kind, fixed)
    made = {name: made[name].to(entries[name].dtype) for name in made if name not in kind.settings}
    own = {name: value.clone() for name, value in entries.items()}
    for name, value in made.items():
        if value.dim() and len(value) == len(fixed):
            own[name][places] = value[places]
    away = (dense_form(kind, own) - fixed).abs().max()
    if away <= _SAME * fixed.abs().max():
        return own
    return {**own, **made}


def _measures(weight: Tensor, left_out: Tensor, places: Tensor) -> Dict[str, float]:
    norms = row_norms(weight.float())
    kept = torch.ones(len(weight), dtype=torch.bool)
    kept[left_out] = False
    shortest = float(norms[kept].min()) if bool(kept.any()) else 0.0
    return {
        "mean length of these rows": float(norms[places].mean()) if len(places) else 0.0,
        "shortest row": shortest,
        "median length of all rows": float(norms[kept].median()),
        "longest row": float(norms[kept].max()),
        "mean cosine of all rows": mean_cosine(weight.float(), left_out),
    }


def write_folder(opened: OpenedModel, changed: Mapping[str, Tensor], folder: Path) -> None:
    """Copy the folder of a model, with the changed tensors in the files that hold them.

    Args:
        opened: a model of Hugging Face's libraries.
        changed: name -> tensor.
        folder: an empty one.

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
                f"parts of it in {', '.join(path.name for path in holders[:4])}",
                "Put the parts together first.",
            )
    files = {name: opened.file_of(name) for name in changed}
    for path in sorted(source.iterdir()):
        if os.path.isfile(path):
            own = {name: changed[name] for name, file in files.items() if file == path}
            if own:
                write_weights(path, own, folder / path.name)
            else:
                shutil.copyfile(path, folder / path.name)


def write_weights(source: Path, changed: Mapping[str, Tensor], target: Path) -> None:
    """Write a file of weights anew with other tensors in it.

    Raises:
        UnsupportedError: it is no file of safetensors.
    """
    if source.suffix != ".safetensors":
        raise UnsupportedError(
            "a fairseq checkpoint, or a model in files of safetensors",
            f"{source}",
            "Load the model, call repair_ of spectral_fairseq.training, and save it again.",
        )
    with needs_extra("models", "to write safetensors"):
        import safetensors
        import safetensors.torch
    with safetensors.safe_open(str(source), framework="pt", device="cpu") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    tensors.update((name, value.clone().contiguous()) for name, value in changed.items())
    safetensors.torch.save_file(tensors, str(target), metadata=metadata)
