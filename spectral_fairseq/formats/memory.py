"""A model or a table in memory: a tensor, an array, a state dict or a torch module."""

from __future__ import annotations

from typing import Any, Dict, Mapping

import numpy as np
from torch import Tensor, nn

from spectral_fairseq.embeddings import Table
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.formats.config import ModelConfig
from spectral_fairseq.formats.roles import may_be_table
from spectral_fairseq.formats.state_dicts import state_dict_of, tensor_of
from spectral_fairseq.formats.stored import Stored


def open_memory(model: Any) -> Stored:
    """Take the tensors of a model; nothing is copied, but for a table that LoRA changes.

    Args:
        model: a tensor or an array of shape (N, d); a mapping from names to tensors, such as a
            state dict; or a module.

    Raises:
        ConfigurationError: anything else, a model without its weights, or one whose parameters
            FSDP splits over processes.
    """
    kind = type(model).__name__
    if isinstance(model, nn.Module):
        opened = _module(model, kind)
    else:
        if isinstance(model, np.ndarray):
            model = tensor_of(model, f"the {kind}")
        named = {"tensor": model} if isinstance(model, Tensor) else model
        tensors, unread = state_dict_of(named) if isinstance(named, Mapping) else ({}, {})
        if not tensors and not unread:
            raise ConfigurationError(
                "a path, a tensor, an array, a state dict or a torch module",
                f"an object of type {kind}",
                "Pass model.state_dict(), or the table itself.",
            )
        tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        opened = Stored(name=f"the {kind}", tensors=tensors, unread=unread)
    if any(tensor.device.type == "meta" for tensor in opened.tensors.values()):
        found = "tensors on the device meta"
        raise ConfigurationError(f"the weights of {opened.name}", found, "Load them first.")
    return opened


def _module(model: nn.Module, kind: str) -> Stored:
    # Its state_dict() waits for the other processes, which may not call it.
    if any(type(layer).__name__ == "FullyShardedDataParallel" for layer in model.modules()):
        raise ConfigurationError(
            f"a module that holds its parameters, as the {kind}",
            "parameters that FSDP splits over processes",
            "Take a full state dict in all processes (StateDictType.FULL_STATE_DICT), and pass it.",
        )
    # Detaching may be left to the tensors that can be read: others answer with communication.
    state = model.state_dict(keep_vars=True)
    tensors, unread = state_dict_of(state)
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    tensors = {**tensors, **_shared_tables(model, tensors)}
    inputs = _look_ups(model)
    tensors = _without_adapters(model, tensors)
    settings = getattr(getattr(model, "module", model), "config", None)
    if settings is not None and hasattr(settings, "to_dict"):  # of transformers
        config = ModelConfig.of(settings.to_dict())
        padding = config.padding
    else:
        # Those of the look-ups of words, or of all if no name tells which these are.
        words = [layer for k, layer in inputs.items() if may_be_table(k, *layer.weight.shape)]
        rows = (
            layer.excluded if isinstance(layer, Table) else [layer.padding_idx]
            for layer in words or inputs.values()
        )
        config, padding = ModelConfig(), sorted({row for some in rows for row in some} - {None})
    return Stored(
        name=f"the module {kind}",
        tensors=tensors,
        only_input=next(iter(inputs)) if len(inputs) == 1 else None,
        uncounted=padding,
        arch=kind,
        unread=unread,
        config=config,
    )


def _look_ups(model: nn.Module) -> Dict[str, Any]:
    """The layers that look up vectors by the names of what they store, and tables alone."""
    named = dict(model.named_modules())
    used = {getattr(layer, "stored_table", None) for layer in named.values()}
    found: Dict[str, Any] = {}
    for name, layer in named.items():
        if isinstance(layer, nn.Embedding):
            has_table = hasattr(layer, "stored_table")
            found[f"{name}.table".lstrip(".") if has_table else name or "weight"] = layer
        elif isinstance(layer, Table) and layer not in used:
            found[name or "table"] = layer
    return found


def _shared_tables(model: nn.Module, tensors: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """The entries of tables that another layer owns, under the names of the layers that use them.

    A plain tied weight has the names of all its layers; ``spectral_fairseq.training`` leaves the
    table that takes its place with one of them.
    """
    shared = {}
    for name, layer in model.named_modules():
        table = getattr(layer, "stored_table", None)
        for key, entry in table.state_dict().items() if isinstance(table, Table) else ():
            shared[f"{name}.table.{key}".lstrip(".")] = entry
    return {key: entry for key, entry in shared.items() if key not in tensors}


def _without_adapters(model: nn.Module, tensors: Dict[str, Tensor]) -> Dict[str, Tensor]:
    """The tensors with the tables that a forward pass uses in place of those that peft adapts.

    Tables with adapters of other kinds than LoRA stay in parts, and are refused by name later.
    """
    for name, layer in model.named_modules():
        base = f"{name}.base_layer.weight"
        chosen = getattr(layer, "modules_to_save", None)
        if isinstance(chosen, nn.ModuleDict) and hasattr(layer, "original_module"):
            active: Any = getattr(layer, "active_adapter", None)
            used = f"{name}.modules_to_save.{active}." if active in chosen else ""
            if getattr(layer, "disable_adapters", False):
                used = f"{name}.original_module."
            if used:
                kept = {k.removeprefix(used): v for k, v in tensors.items() if k.startswith(used)}
                tensors = _outside(name, tensors)
                tensors.update((f"{name}.{key}", tensor) for key, tensor in kept.items())
        elif base in tensors and hasattr(layer, "get_delta_weight"):
            weight = tensors[base]
            if not (getattr(layer, "merged", False) or getattr(layer, "disable_adapters", False)):
                other = getattr(layer, "lora_variant", None) or not hasattr(layer, "lora_A")
                if other or any(getattr(layer, "use_dora", {}).values()) or weight.dim() != 2:
                    continue
                if not (may_be_table(name, *weight.shape) and weight.is_floating_point()):
                    continue
                for adapter in layer.active_adapters:
                    if adapter in layer.lora_A or adapter in layer.lora_embedding_A:
                        weight = weight + layer.get_delta_weight(adapter).detach()
            bias = tensors.get(f"{name}.base_layer.bias")
            tensors = {**_outside(name, tensors), f"{name}.weight": weight}
            if bias is not None:
                tensors[f"{name}.bias"] = bias
    return tensors


def _outside(module: str, tensors: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if not key.startswith(f"{module}.")}
