"""The states of the streams in one pass: a carry for each micro-batch of an update."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

import torch

from spectral_fairseq.lm.awd_lstm import Carry


class SlotCarries:
    """Hands out the carry that a micro-batch continues."""

    def __init__(self) -> None:
        self._carries: Dict[int, Carry] = {}
        self._before: Dict[int, Tuple[int, Any]] = {}

    def reset(self) -> None:
        """Forget all states."""
        self._carries.clear()
        self._before.clear()

    def at(self, slot: int, segment: int) -> Carry:
        """The carry for one micro-batch, in the state that the micro-batch starts from.

        The first segment starts with a fresh state. fairseq feeds a micro-batch a second time after
        some failures (overflow under --amp, out of memory in validation); it then starts from the
        same state as the first time.

        Args:
            slot: which micro-batch of the update.
            segment: number of the segment, from 0.
        """
        carry = self._carries.setdefault(slot, Carry())
        if segment == 0:
            carry.reset()
        elif self._before.get(slot, (None, None))[0] == segment:
            carry.state = self._before[slot][1]
        self._before[slot] = (segment, carry.state)
        return carry

    def states(self, slots: int) -> List[Any]:
        """Copies on the CPU of the states of ``slots`` slots."""
        carries = [self._carries.get(slot, Carry()) for slot in range(slots)]
        return [_mapped(carry.state, lambda x: x.detach().cpu().clone()) for carry in carries]

    def restore(self, states: List[Any]) -> None:
        """Continue from what :meth:`states` returned."""
        self.reset()
        self._carries = {slot: Carry(state) for slot, state in enumerate(states)}

    def to(self, device: torch.device) -> None:
        """Move all states."""
        for carry in self._carries.values():
            carry.state = _mapped(carry.state, lambda x: x.to(device))


def _mapped(state: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if torch.is_tensor(state):
        return function(state)
    if isinstance(state, dict):
        return {key: _mapped(value, function) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_mapped(value, function) for value in state)
    return state
