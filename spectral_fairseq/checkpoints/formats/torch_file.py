"""What ``torch.save`` wrote: a fairseq checkpoint, or the state dict of any other model.

Nothing in the file is executed: see :mod:`spectral_fairseq.checkpoints.reading`. Checksums are
left to the caller, since a model may be in several files of which one is needed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple

from torch import Tensor

from spectral_fairseq.checkpoints.collapse import PADDING_ROW
from spectral_fairseq.checkpoints.dictionary import checkpoint_settings, find_dictionary
from spectral_fairseq.checkpoints.formats.opened import OpenedModel
from spectral_fairseq.checkpoints.formats.state_dict import state_dict_of
from spectral_fairseq.checkpoints.reading import check_fairseq, read_torch_file, tensors_of
from spectral_fairseq.checkpoints.structure import check_model
from spectral_fairseq.checkpoints.tables import Unread
from spectral_fairseq.errors import CheckpointError

ZIP, PICKLE = b"PK\x03\x04", b"\x80"
TORCH_STARTS = (ZIP, PICKLE)
"""The first bytes of what ``torch.save`` writes, in its present form and the one before."""

# What fairseq's trainer saves and other projects do not.
_OF_FAIRSEQ = {"optimizer_history", "task_state", "extra_state"}


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
        _check_whole(state, tensors_of(state["model"]), path)
        return _fairseq(state, path)
    tensors, unread = _state_dict(state, path, stored_bytes)
    settings = checkpoint_settings(state, "args") if isinstance(state, dict) else {}
    return OpenedModel(
        name=str(path),
        tensors=tensors,
        path=path,
        weights=path,
        unread=unread,
        # Other projects keep the largest size that a vocabulary may have under the usual names.
        settings={k: v for k, v in settings.items() if k == "padded_vocab_size"},
        declared_parts=_declared_parts(state) if isinstance(state, dict) else 1,
    )


def _is_fairseq(state: Any) -> bool:
    """Many projects save ``model`` beside ``args``; only fairseq's settings name a task."""
    if not (isinstance(state, dict) and isinstance(state.get("model"), dict)):
        return False
    task = checkpoint_settings(state, "task")
    has_task = "_name" in task or "task" in task
    return bool({"args", "cfg"} & {*state}) and (has_task or bool(_OF_FAIRSEQ & {*state}))


def read_state_dict(path: Path) -> Tuple[Dict[str, Tensor], Dict[str, Unread]]:
    """Name -> tensor of a state dict, alone or in what a training loop saved, and what is not read.

    Args:
        path: the file.

    Raises:
        CheckpointError: as for :func:`open_torch`.
    """
    state, stored_bytes = read_torch_file(path, verify=False)
    return _state_dict(state, path, stored_bytes)


def _state_dict(
    state: Any, path: Path, stored_bytes: int
) -> Tuple[Dict[str, Tensor], Dict[str, Unread]]:
    tensors, unread = state_dict_of(state)
    if isinstance(state, dict):
        _check_whole(state, tensors, path)
    if tensors or unread:
        check_model(tensors, path, stored_bytes)
        return tensors, unread
    shown = ", ".join(map(str, state)) if isinstance(state, dict) else type(state).__name__
    raise CheckpointError(
        f"a state dict, alone or as an entry of a dictionary, in {path}",
        shown[:300] or "nothing",
        "Save model.state_dict() with torch.save.",
    )


def _check_whole(state: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Refuse what FSDP and DeepSpeed save of one process, in which no table is whole.

    Raises:
        CheckpointError: it is such a part.
    """
    optimizer = state.get("optimizer_state_dict")
    of_zero = isinstance(optimizer, Mapping) and "zero_stage" in optimizer
    empty = bool(tensors) and not any(one.numel() for one in tensors.values() if one.dim())
    if of_zero or (empty and "param_shapes" in state):
        raise CheckpointError(
            f"the weights of a whole model in {path}",
            "what DeepSpeed's ZeRO saves of one process",
            "Put the parts together with the zero_to_fp32.py that DeepSpeed puts beside them.",
        )
    if "shard_metadata" in state or any("flat_param" in name.split(".")[-1] for name in tensors):
        raise CheckpointError(
            f"the weights of a whole model in {path}",
            "the part of one process of FSDP, flat_param",
            "Put the parts together, for example with consolidate_fsdp_shards of fairseq.",
        )


def _declared_parts(state: Any) -> int:
    """In how many files a model is by the settings in one of them: 1 if they do not say."""
    settings = {**checkpoint_settings(state, "common"), **checkpoint_settings(state, "args")}
    settings["mp_world_size"] = state.get("mp_world_size")  # of DeepSpeed

    def size(name: str) -> int:
        return settings[name] if type(settings.get(name)) is int else 1

    of_megatron = size("tensor_model_parallel_size") * size("pipeline_model_parallel_size")
    return max(1, of_megatron, size("model_parallel_size"), size("mp_world_size"))


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
        declared_parts=_declared_parts(checkpoint),
    )


def _training_dictionary(checkpoint: Mapping[str, Any], path: Path, table: str, rows: int) -> Any:
    return find_dictionary(None, checkpoint, table, rows, path)


def _whole(number: Any) -> Optional[int]:
    return None if number is None else int(number)
