"""What fairseq's optimiser holds for a parameter: the weights that it trains, and its moments."""

from __future__ import annotations

from typing import Any, Dict, Tuple

from torch import Tensor


def trained_weights(optimizer: Any, parameter: Tensor) -> Tensor:
    """What fairseq's optimiser trains for a parameter: itself, or its float32 copy.

    Args:
        optimizer: as the trainer holds it.
        parameter: of the model.

    Returns:
        Shape of the parameter, without a gradient; writing to it changes what is trained.
    """
    held, offset = _held(optimizer, parameter)
    return _part(held, offset, parameter)


def moments(optimizer: Any, parameter: Tensor) -> Dict[str, Tensor]:
    """The tensors in the state of fairseq's optimiser that belong to a parameter.

    Args:
        optimizer: as the trainer holds it.
        parameter: of the model.

    Returns:
        Tensors by their names; writing to them changes the state. Those with as many entries as
        the parameter have its shape. There are none before the first step.
    """
    held, offset = _held(optimizer, parameter)
    state = optimizer.optimizer.state.get(held, {})
    return {
        name: _part(value, offset, parameter) if value.numel() == held.numel() else value
        for name, value in state.items()
        if isinstance(value, Tensor) and value.dim() > 0
    }


def _held(optimizer: Any, parameter: Tensor) -> Tuple[Tensor, int]:
    """The tensor that the optimiser trains, and where the parameter begins in it."""
    copies = getattr(optimizer, "fp32_params", None)
    if copies is None:
        return parameter, 0
    if not isinstance(copies, dict):  # --fp16-no-flatten-grads, --bf16
        (copy,) = (c for p, c in zip(optimizer.fp16_params, copies) if p is parameter)
        return copy, 0
    offset = 0  # one flat tensor for each device
    for other in optimizer.fp16_params:
        if other is parameter:
            break
        if other.device == parameter.device:
            offset += other.numel()
    return copies[parameter.device.index], offset


def _part(held: Tensor, offset: int, parameter: Tensor) -> Tensor:
    flat = held.detach().view(-1)
    return flat[offset : offset + parameter.numel()].view_as(parameter)
