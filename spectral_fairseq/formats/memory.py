"""A model or a table in memory: a tensor, an array, a state dict or a torch module."""

from __future__ import annotations

from typing import Any, Mapping

import numpy as np
from torch import Tensor, nn

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.formats.config import padding_rows
from spectral_fairseq.formats.numpy_arrays import tensor_of
from spectral_fairseq.formats.roles import may_be_table
from spectral_fairseq.formats.state_dicts import state_dict_of, without_adapters
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
    opened = _module(model, kind) if isinstance(model, nn.Module) else _tensors(model, kind)
    if any(tensor.device.type == "meta" for tensor in opened.tensors.values()):
        found = "tensors on the device meta"
        raise ConfigurationError(f"the weights of {opened.name}", found, "Load them first.")
    return opened


def _tensors(model: Any, kind: str) -> Stored:
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
    return Stored(name=f"the {kind}", tensors=tensors, unread=unread)


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
    tensors = without_adapters(model, {name: tensor.detach() for name, tensor in tensors.items()})
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
