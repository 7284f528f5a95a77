"""What ``torch.save`` wrote: a fairseq checkpoint, or the state dict of any other model.

Nothing in the file is executed: see :mod:`spectral_fairseq.checkpoints.reading`. Checksums are
left to the caller, since a model may be in several files of which one is needed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Dict, Mapping, Optional

import torch
from torch import Tensor

from spectral_fairseq.checkpoints.collapse import PADDING_ROW
from spectral_fairseq.checkpoints.dictionary import checkpoint_settings, find_dictionary
from spectral_fairseq.checkpoints.formats.opened import OpenedModel
from spectral_fairseq.checkpoints.reading import check_fairseq, read_torch_file, tensors_of
from spectral_fairseq.checkpoints.structure import check_model
from spectral_fairseq.errors import CheckpointError

ZIP, PICKLE = b"PK\x03\x04", b"\x80"
TORCH_STARTS = (ZIP, PICKLE)
"""The first bytes of what ``torch.save`` writes, in its present form and the one before."""

# What fairseq's trainer saves and other projects do not.
_OF_FAIRSEQ = {"optimizer_history", "task_state", "extra_state"}

# Where training loops keep the state dict in what they save.
_HOLDERS = ("state_dict", "model_state_dict", "model", "module", "weights", "params")


def open_torch(path: Path) -> OpenedModel:
    """Open a fairseq checkpoint or a state dict.

    Args:
        path: the file.

    Raises:
        CheckpointError: damaged, with objects that could run code, or neither of the two.
    """
    state, stored_bytes = read_torch_file(path, verify=False)
    if _is_fairseq(state):
        check_fairseq(state, path, stored_bytes)
        return _fairseq(state, path)
    tensors = _state_dict(state, path, stored_bytes)
    return OpenedModel(name=str(path), tensors=tensors, path=path, weights=path)


def _is_fairseq(state: Any) -> bool:
    """Many projects save ``model`` beside ``args``; only fairseq's settings name a task."""
    if not (isinstance(state, dict) and isinstance(state.get("model"), dict)):
        return False
    task = checkpoint_settings(state, "task")
    has_task = "_name" in task or "task" in task
    return bool({"args", "cfg"} & {*state}) and (has_task or bool(_OF_FAIRSEQ & {*state}))


def read_state_dict(path: Path) -> Dict[str, Tensor]:
    """Name -> tensor of a state dict, alone or in what a training loop saved.

    Args:
        path: the file.

    Raises:
        CheckpointError: as for :func:`open_torch`.
    """
    state, stored_bytes = read_torch_file(path, verify=False)
    return _state_dict(state, path, stored_bytes)


def _state_dict(state: Any, path: Path, stored_bytes: int) -> Dict[str, Tensor]:
    if isinstance(state, Tensor):
        state = {"weight": state}
    holders = [state, *(state.get(name) for name in _HOLDERS)] if isinstance(state, dict) else []
    found = [dense for dense in map(_dense, holders) if dense]
    # A training loop may keep its loss, for one, as a tensor beside the state dict.
    with_matrix = [dense for dense in found if any(one.dim() == 2 for one in dense.values())]
    if found:
        tensors = (with_matrix or found)[0]
        check_model(tensors, path, stored_bytes)
        return tensors
    shown = ", ".join(map(str, state)) if isinstance(state, dict) else type(state).__name__
    raise CheckpointError(
        f"a state dict, alone or under one of the names {', '.join(_HOLDERS)}, in {path}",
        shown[:300] or "nothing",
        "Save model.state_dict() with torch.save.",
    )


def _dense(holder: Any) -> Optional[Dict[str, Tensor]]:
    """The tensors that can be tables; others, such as complex tables of rotations, are no error."""
    if not isinstance(holder, Mapping):
        return None
    return {
        str(name): value
        for name, value in holder.items()
        if isinstance(value, Tensor)
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_complex() or "float8" in str(value.dtype))
    }


def _fairseq(checkpoint: Dict[str, Any], path: Path) -> OpenedModel:
    tensors = tensors_of(checkpoint.pop("model"))
    checkpoint.pop("last_optimizer_state", None)
    history = checkpoint.get("optimizer_history") or [{}]
    last = history[-1] if isinstance(history[-1], dict) else {}
    iterator = (checkpoint.get("extra_state") or {}).get("train_iterator") or {}
    model = checkpoint_settings(checkpoint, "model")
    arch = model.get("_name") or model.get("arch")
    return OpenedModel(
        name=str(path),
        tensors=tensors,
        path=path,
        weights=path,
        find_words=partial(_training_dictionary, checkpoint, path),
        uncounted=[PADDING_ROW],
        arch=None if arch is None else str(arch),
        epoch=_whole(iterator.get("epoch")),
        updates=_whole(last.get("num_updates")),
        checkpoint=checkpoint,
    )


def _training_dictionary(checkpoint: Mapping[str, Any], path: Path, table: str, rows: int) -> Any:
    return find_dictionary(None, checkpoint, table, rows, path)


def _whole(number: Any) -> Optional[int]:
    return None if number is None else int(number)
