"""Optimisers whose state is wider than parameters of 16 bits, and how a saved one is read."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional

import torch
from torch import Tensor

from spectral_fairseq.errors import NEW_STATE, CheckpointError
from spectral_fairseq.functional.precision import at_least_float32


def saved_groups(
    state_dict: Mapping[str, Any], entry: str = "params", kind: str = "an optimiser"
) -> List[Dict[str, Any]]:
    """The groups of parameters in the saved state of an optimiser.

    Args:
        state_dict: as torch saves it.
        entry: what each group has.
        kind: of the optimiser, whose groups have it.

    Raises:
        CheckpointError: it has no groups of parameters, no state, or a group without the entry.
    """
    groups = state_dict.get("param_groups")
    has_groups = isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    )
    for name, there in (
        ("param_groups", has_groups),
        ("state", isinstance(state_dict.get("state"), dict)),
    ):
        if not there:
            raise CheckpointError(
                f"the state of an optimiser, with {name} as torch saves them",
                f"no such {name}",
                f"Take another checkpoint of the run. {NEW_STATE}",
            )
    if any(entry not in group for group in groups or ()):
        raise CheckpointError(f"the state of {kind}", "the state of another optimiser", NEW_STATE)
    return list(groups or ())


class WideStateOptimizer(torch.optim.Optimizer):
    """Base class of optimisers whose state is float32 or wider where parameters have 16 bits.

    Class attributes:
        saved_entry: what each group of parameters has in a saved state.
        saved_kind: of the optimisers whose states have it.
    """

    # fairseq's half-precision wrappers read these attributes. The last one stops fairseq from
    # restoring the saved state on the CPU after load_state_dict, which has already moved it to the
    # device and to its own dtype.
    supports_memory_efficient_fp16 = True
    disable_mem_eff_fp16_loading_hack = True
    saved_entry: str
    saved_kind: str

    @staticmethod
    def _evaluated(closure: Optional[Callable[[], Any]]) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def load_state_dict(self, state_dict: Any) -> None:
        """Resume from a saved state; the parameters must be loaded before.

        torch converts every tensor of the state to the dtype of its parameter; averages and moments
        get their own precision back.

        Raises:
            CheckpointError: it is not the state of an optimiser, or of another one.
        """
        groups = saved_groups(state_dict, self.saved_entry, self.saved_kind)
        super().load_state_dict(state_dict)
        saved = (key for group in groups for key in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for key, parameter in zip(saved, parameters):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point() and name != "step":
                    self.state[parameter][name] = value.to(
                        device=parameter.device, dtype=at_least_float32(parameter.dtype), copy=True
                    )
