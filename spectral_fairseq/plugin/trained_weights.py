"""What fairseq's optimiser trains for a parameter, and what it remembers of it."""

from __future__ import annotations

from typing import Any, Dict

from torch import Tensor

from spectral_fairseq.compat.float32_weights import Held, float32_copies, view_for


def trained_weights(optimizer: Any, parameter: Tensor) -> Tensor:
    """What fairseq's optimiser trains for a parameter: itself, or its float32 copy.

    It has the shape of the parameter and no gradient; writing to it changes what is trained.
    """
    return view_for(_held(optimizer, parameter), parameter)


def moments(optimizer: Any, parameter: Tensor) -> Dict[str, Tensor]:
    """The tensors in the state of fairseq's optimiser that belong to a parameter, by name.

    Writing to them changes the state. Those with as many entries as the parameter have its shape.
    There are none before the first step.
    """
    held, start = _held(optimizer, parameter)
    state = optimizer.optimizer.state.get(held, {})
    return {
        name: view_for((value, start), parameter) if value.numel() == held.numel() else value
        for name, value in state.items()
        if isinstance(value, Tensor) and value.dim() > 0
    }


def _held(optimizer: Any, parameter: Tensor) -> Held:
    """The tensor that the optimiser trains, and where the parameter begins in it."""
    return float32_copies(optimizer).get(id(parameter), (parameter, 0))
