"""The state dicts in what a training loop saved or a program holds: all of them, by their names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Optional, Set, Tuple

import numpy as np
import torch
from torch import Tensor

from spectral_fairseq.errors import CheckpointError, DataError
from spectral_fairseq.formats.parts import PUT_TOGETHER
from spectral_fairseq.formats.roles import is_output_entry, may_hold_table
from spectral_fairseq.formats.stored import Unread

# What a training loop saves beside the weights.
_NO_WEIGHTS = re.compile("optim|sched|scaler|rng", re.IGNORECASE)
_HOLDERS = ("state_dict", "model_state_dict", "model", "module", "weights", "params")
"""Where training loops keep the state dict in what they save."""
_WRAPPERS = re.compile(r"^(module\.|model\.|_orig_mod\.)+")
_DEEPEST = 8
# Types of numbers that torch stores, and hardly computes with.
_NARROW = re.compile("float[48]")


def state_dict_of(state: Any) -> Tuple[Dict[str, Tensor], Dict[str, Unread]]:
    """The tensors of a state dict, alone or in what a training loop saved; nothing is copied.

    The state dict of a holder keeps its names. Others of the same file, such as that of an output
    layer saved apart, have the name of their entry in front. Copies, such as moving averages, are
    left out, and so are the states of optimisers.

    Args:
        state: a tensor, or a mapping of names to tensors and arrays, or to such mappings.

    Returns:
        Name -> tensor, and name -> what cannot be read as a table.
    """
    if not isinstance(state, Mapping):
        state = {"weight": state}
    parts: Dict[str, Dict[str, Any]] = {"": {}}
    seen: Set[int] = {id(state)}
    for name, value in state.items():
        if isinstance(value, (Tensor, np.ndarray)):
            parts[""][str(name)] = value
        elif isinstance(name, str) and not _NO_WEIGHTS.search(name):
            inner = dict(_leaves(value, "", seen))
            if inner:
                parts[name] = inner
    held = [name for name in ("", *_HOLDERS) if name in parts]
    # A training loop may keep its loss, for one, as a tensor beside the state dict.
    matrices = [name for name in held if any(array.ndim == 2 for array in parts[name].values())]
    main = next(iter(matrices or [name for name in held if parts[name]]), "")
    weights = dict(parts[main])
    known = {_WRAPPERS.sub("", name) for name in weights}
    named = _names_a_table(weights)
    for part in parts:
        beside = {f"{part}.{name}".lstrip("."): array for name, array in parts[part].items()}
        copied = known & {_WRAPPERS.sub("", name) for name in parts[part]}
        if part != main and not copied and (named or not weights or _names_a_table(beside)):
            if any(array.ndim == 2 for array in beside.values()):
                weights.update(beside)
    tensors: Dict[str, Tensor] = {}
    unread: Dict[str, Unread] = {}
    for name, value in weights.items():
        try:
            if isinstance(value, np.ndarray):
                if value.dtype.kind in "US":  # text beside the weights
                    continue
                value = tensor_of(value, name)
            why = why_unreadable(value)
        except DataError as error:
            why = f"numbers of type {error.found}"
        if why is None:
            # What all devices hold alike needs no communication.
            tensors[name] = value.to_local() if hasattr(value, "placements") else value
        else:
            unread[name] = Unread(tuple(value.shape), why)
    return tensors, unread


def check_saved_whole(
    path: Path,
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
) -> None:
    """Refuse what one of several processes saved, by what is in the file.

    Args:
        path: of the file.
        state: all of it.
        tensors: those of its model, by their names, which need not be checked yet.
        settings: of the training.

    Raises:
        CheckpointError: its settings say that several processes hold the model; or it has the flat
            parameters of FSDP or the pieces of DeepSpeed's ZeRO, in which no table is whole.
    """
    optimizer = state.get("optimizer_state_dict")
    of_zero = isinstance(optimizer, Mapping) and "zero_stage" in optimizer
    empty = bool(tensors) and not any(tensor.numel() for tensor in tensors.values() if tensor.dim())
    of_zero = of_zero or (empty and "param_shapes" in state)
    flat = any("flat_param" in str(name).split(".")[-1] for name in tensors)
    if of_zero or flat or "shard_metadata" in state:
        raise CheckpointError(
            f"the weights of a whole model in {path}",
            f"the part of one process, as {'DeepSpeed ZeRO' if of_zero else 'FSDP'} saves it",
            "Put the parts together: with DeepSpeed's zero_to_fp32.py, which lies beside them, or "
            "consolidate_fsdp_shards of fairseq.",
        )
    sizes = {**settings, "mp_world_size": state.get("mp_world_size")}  # the last of DeepSpeed
    known = {name: size for name, size in sizes.items() if type(size) is int}
    of_megatron = known.get("tensor_model_parallel_size", 1)
    of_megatron *= known.get("pipeline_model_parallel_size", 1)
    others = (known.get(name, 1) for name in ("model_parallel_size", "mp_world_size"))
    processes = max(of_megatron, *others)
    if processes > 1:
        found = f"one of {processes} parts, by its settings"
        raise CheckpointError(f"a whole model in {path}", found, PUT_TOGETHER)


def tensor_of(array: np.ndarray, name: Any) -> Tensor:
    """The tensor that shares an array's memory.

    Raises:
        DataError: torch does not have such numbers, or some of them are masked.
    """
    if np.ma.is_masked(array):
        remedy = "Fill in their values first, for example with array.filled(0)."
        raise DataError(f"an array without masked numbers as {name}", "a masked array", remedy)
    if min(array.strides, default=0) < 0:  # such as table[::-1], which torch cannot share
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        wanted = f"numbers that torch has, in the byte order of this machine, in {name}"
        remedy = "Save or pass the array as float32, for example."
        raise DataError(wanted, f"{array.dtype.str}", remedy) from error


def _leaves(value: Any, prefix: str, seen: Set[int], depth: int = 0) -> Iterator[Tuple[str, Any]]:
    """Tensors and arrays in mappings and lists, each with its full name; each container once."""
    if isinstance(value, (Tensor, np.ndarray)):
        yield prefix, value
    elif isinstance(value, (Mapping, list, tuple)) and depth < _DEEPEST and id(value) not in seen:
        seen.add(id(value))
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, item in items:
            if isinstance(name, str) and _NO_WEIGHTS.search(name) and not hasattr(item, "ndim"):
                continue
            yield from _leaves(item, f"{prefix}.{name}".lstrip("."), seen, depth + 1)


def _names_a_table(arrays: Mapping[str, Any]) -> bool:
    """Whether an entry may be a table, or an output layer that lies the other way round."""
    return any(
        may_hold_table(key, array.shape)
        or (array.ndim == 2 and array.shape[0] < array.shape[1] and is_output_entry(key))
        for key, array in arrays.items()
    )


def why_unreadable(tensor: Tensor) -> Optional[str]:
    """Why a tensor cannot be a table; no operation is done, which might wait for other processes.

    What is split over devices answers every operation with communication, or with an error.
    """
    if hasattr(tensor, "placements") and all(
        placement.is_replicate() for placement in tensor.placements
    ):
        return None
    if hasattr(tensor, "placements") or type(tensor).__name__ == "ShardedTensor":
        return (
            f"split over devices ({type(tensor).__name__}): call its full_tensor() in all "
            "processes, or pass what get_model_state_dict returns with full_state_dict=True"
        )
    if hasattr(tensor, "ds_id") and tensor.numel() == 0:
        return "split over devices by DeepSpeed's third stage: gather it with GatheredParameters"
    if hasattr(tensor, "__tensor_flatten__"):  # of torchao, for example
        return f"a tensor of the class {type(tensor).__name__}"
    if tensor.layout is not torch.strided:
        return "a sparse tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.is_complex() or _NARROW.search(str(tensor.dtype)):
        return f"numbers of type {tensor.dtype}".replace("torch.", "")
    return None
