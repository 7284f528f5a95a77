"""A model or a table in memory: a tensor, an array, a state dict or a torch module."""

from __future__ import annotations

from typing import Any, Dict, Mapping

import numpy as np
from torch import Tensor, nn

from spectral_fairseq.checkpoints.formats.numpy_file import tensor_of
from spectral_fairseq.checkpoints.formats.opened import OpenedModel, padding_rows
from spectral_fairseq.checkpoints.table_uses import may_be_table
from spectral_fairseq.errors import ConfigurationError


def open_memory(model: Any) -> OpenedModel:
    """Take the tensors of a model; nothing is copied.

    Args:
        model: a tensor or an array of shape (N, d); a mapping from names to tensors, such as a
            state dict; or a module.

    Raises:
        ConfigurationError: anything else, or a model without its weights.
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
    if isinstance(model, Tensor):
        tensors: Dict[str, Tensor] = {"tensor": model.detach()}
    elif isinstance(model, Mapping) and any(isinstance(one, Tensor) for one in model.values()):
        tensors = {str(k): one.detach() for k, one in model.items() if isinstance(one, Tensor)}
    else:
        raise ConfigurationError(
            "a path, a tensor, an array, a state dict or a torch module",
            f"an object of type {kind}",
            "Pass model.state_dict(), or the table itself.",
        )
    return OpenedModel(name=f"the {kind}", tensors=tensors)


def _module(model: nn.Module, kind: str) -> OpenedModel:
    state = model.state_dict()
    inputs = {name: one for name, one in model.named_modules() if isinstance(one, nn.Embedding)}
    words = {k: one for k, one in inputs.items() if may_be_table(k, *one.weight.shape)} or inputs
    config = getattr(getattr(model, "module", model), "config", None)
    if config is not None and hasattr(config, "to_dict"):  # of transformers
        padding = padding_rows(config.to_dict())
    else:
        padding = sorted({one.padding_idx for one in words.values() if one.padding_idx is not None})
    return OpenedModel(
        name=f"the module {kind}",
        tensors={name: one.detach() for name, one in state.items() if isinstance(one, Tensor)},
        default_table=next(iter(inputs)) or "weight" if len(inputs) == 1 else None,
        uncounted=padding,
        arch=kind,
    )
