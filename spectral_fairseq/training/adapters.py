"""What peft puts around a model and its layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from spectral_fairseq.errors import UnsupportedError


def is_of_peft(layer: nn.Module) -> bool:
    """Whether a module is one of peft's, around a model or one of its layers."""
    return any(kind.__module__.split(".")[0] == "peft" for kind in type(layer).__mro__)


def trained_copy(layer: Any) -> Any:
    """The layer that is trained in the place of ``layer``: peft's copy for ``modules_to_save``."""
    copies = getattr(layer, "modules_to_save", None)
    if not (isinstance(layer, nn.Module) and is_of_peft(layer) and copies is not None):
        return layer
    active = getattr(layer, "active_adapters", None) or [layer.active_adapter]
    return copies[active[0]] if active[0] in copies else layer.original_module


def with_adapters(layer: Any, weight: Tensor) -> Tensor:
    """The matrix of an output layer, with what LoRA of peft adds to it: W + s B A.

    Raises:
        UnsupportedError: an adapter that is more than this sum.
    """
    if not is_of_peft(layer) or layer.disable_adapters or layer.merged:
        return weight
    for name in (adapter for adapter in layer.active_adapters if adapter in layer.lora_A):
        dropout = getattr(layer.lora_dropout[name], "p", 0.0)
        other = name in getattr(layer, "lora_variant", {}) or layer.use_dora.get(name, False)
        if other or getattr(layer.lora_B[name], "bias", None) is not None or dropout:
            raise UnsupportedError(
                "LoRA as W + s B A on the output layer, without dropout, a bias or DoRA",
                f"another adapter, {name!r}",
                "Set lora_dropout=0, or train the output layer as a whole (modules_to_save).",
            )
        weight = weight + layer.get_delta_weight(name).to(weight.dtype)
    return weight
