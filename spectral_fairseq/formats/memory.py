"""A model or a table in memory: a tensor, an array, a state dict or a torch module."""

from __future__ import annotations

from typing import Any, Dict, Mapping

import numpy as np
from torch import Tensor, nn

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.formats.config import padding_rows
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
    tensors = _without_adapters(model, {name: tensor.detach() for name, tensor in tensors.items()})
    inputs = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Embedding)
    }
    words = {
        k: layer for k, layer in inputs.items() if may_be_table(k, *layer.weight.shape)
    } or inputs
    config = getattr(getattr(model, "module", model), "config", None)
    settings: Any = {}
    if config is not None and hasattr(config, "to_dict"):  # of transformers
        settings = config.to_dict()
        padding = padding_rows(settings)
    else:
        padding = sorted(
            {layer.padding_idx for layer in words.values() if layer.padding_idx is not None}
        )
    return Stored(
        name=f"the module {kind}",
        tensors=tensors,
        only_input=next(iter(inputs)) or "weight" if len(inputs) == 1 else None,
        uncounted=padding,
        arch=kind,
        unread=unread,
        settings=settings,
    )


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
