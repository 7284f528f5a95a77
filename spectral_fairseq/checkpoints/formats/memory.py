"""A model or a table in memory: a tensor, an array, a state dict or a torch module."""

from __future__ import annotations

from typing import Any, Dict, Mapping

import numpy as np
from torch import Tensor, nn

from spectral_fairseq.checkpoints.formats.numpy_file import tensor_of
from spectral_fairseq.checkpoints.formats.opened import OpenedModel, padding_rows
from spectral_fairseq.checkpoints.formats.state_dict import state_dict_of
from spectral_fairseq.checkpoints.table_uses import may_be_table
from spectral_fairseq.errors import ConfigurationError


def open_memory(model: Any) -> OpenedModel:
    """Take the tensors of a model; nothing is copied, but for a table that LoRA changes.

    Args:
        model: a tensor or an array of shape (N, d); a mapping from names to tensors, such as a
            state dict; or a module.

    Raises:
        ConfigurationError: anything else, a model without its weights, or one whose parameters
            FSDP splits over processes.
    """
    kind = type(model).__name__
    opened = _module(model, kind) if isinstance(model, nn.Module) else _tensors(model, kind)
    if any(one.device.type == "meta" for one in opened.tensors.values()):
        raise ConfigurationError(
            f"the weights of {opened.name}", "tensors on the device meta", "Load them first."
        )
    return opened


def _tensors(model: Any, kind: str) -> OpenedModel:
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
    tensors = {name: one.detach() for name, one in tensors.items()}
    return OpenedModel(name=f"the {kind}", tensors=tensors, unread=unread)


def _module(model: nn.Module, kind: str) -> OpenedModel:
    # Its state_dict() waits for the other processes, which may not call it.
    if any(type(one).__name__ == "FullyShardedDataParallel" for one in model.modules()):
        raise ConfigurationError(
            f"a module that holds its parameters, as the {kind}",
            "parameters that FSDP splits over processes",
            "Take a full state dict in all processes (StateDictType.FULL_STATE_DICT), and pass it.",
        )
    # Detaching may be left to the tensors that can be read: others answer with communication.
    state = model.state_dict(keep_vars=True)
    tensors, unread = state_dict_of(state)
    tensors = _without_adapters(model, {name: one.detach() for name, one in tensors.items()})
    inputs = {name: one for name, one in model.named_modules() if isinstance(one, nn.Embedding)}
    words = {k: one for k, one in inputs.items() if may_be_table(k, *one.weight.shape)} or inputs
    config = getattr(getattr(model, "module", model), "config", None)
    settings: Any = {}
    if config is not None and hasattr(config, "to_dict"):  # of transformers
        settings = config.to_dict()
        padding = padding_rows(settings)
    else:
        padding = sorted({one.padding_idx for one in words.values() if one.padding_idx is not None})
    return OpenedModel(
        name=f"the module {kind}",
        tensors=tensors,
        default_table=next(iter(inputs)) or "weight" if len(inputs) == 1 else None,
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
            kept = {f"{name}.{k[len(used) :]}": v for k, v in tensors.items() if k.startswith(used)}
            if used:
                tensors = {**_outside(name, tensors), **kept}
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
    return {key: one for key, one in tensors.items() if not key.startswith(f"{module}.")}
