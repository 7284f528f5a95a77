"""Values that a feature keeps in the extra state of fairseq's checkpoints.

fairseq saves the state of a criterion only if it has parameters, and saves that of a task without
ever loading it again. The extra state is written by the trainer and sent to all workers when it is
read.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict


def kept_in_checkpoints(
    name: str, state_of: Callable[[Any], Any], restore: Callable[[Any, Any], None]
) -> Dict[str, Callable[..., Any]]:
    """The functions of fairseq to replace, as ``patching.replaces`` takes them.

    Args:
        name: key in the extra state.
        state_of: what to save for a trainer; nothing is saved if it is empty.
        restore: gives a trainer what was saved, or ``None`` if the checkpoint lacks it. It is not
            called for a training that begins anew (``--reset-optimizer``).
    """

    def saving(save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save_checkpoint)
        def save_with_state(self: Any, filename: str, extra_state: Any) -> Any:
            state = state_of(self)
            return save_checkpoint(
                self, filename, {**extra_state, name: state} if state else extra_state
            )

        return save_with_state

    def loading(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load_checkpoint)
        def load_with_state(
            self: Any, filename: str, reset_optimizer: bool = False, *args: Any, **kwargs: Any
        ) -> Any:
            extra_state = load_checkpoint(self, filename, reset_optimizer, *args, **kwargs)
            if extra_state is not None and not reset_optimizer:
                restore(self, extra_state.get(name))
            return extra_state

        return load_with_state

    for wrap in (saving, loading):
        wrap.__qualname__ += f"[{name}]"  # patching knows wrappers by their names
    return {
        "fairseq.trainer:Trainer.save_checkpoint": saving,
        "fairseq.trainer:Trainer.load_checkpoint": loading,
    }
