"""What torch's optimisers save, checked before it is read."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping

from spectral_fairseq.errors import CheckpointError


def saved_groups(state_dict: Mapping[str, Any]) -> List[Dict[str, Any]]:
    """The groups of parameters in the saved state of an optimiser.

    Args:
        state_dict: of an optimiser of torch, as a file holds it.

    Raises:
        CheckpointError: it has no groups of parameters, or no state.
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
                "Take another checkpoint of the run, or load the weights alone and start with a "
                "new state of the optimiser (fairseq: --reset-optimizer).",
            )
    return list(groups or ())
