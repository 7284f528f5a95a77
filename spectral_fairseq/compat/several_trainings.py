"""A later training of the same process begins anew, as the trainings of a hydra grid do.

fairseq keeps the best validation loss, and how often it was missed for ``--patience``, in
attributes of two functions. A training that follows another in one process would go on with them:
it would have no ``checkpoint_best.pt`` and end early.
"""

from __future__ import annotations

from typing import Any, Callable

from spectral_fairseq.compat.patching import Patch, replaces, wrapping
from spectral_fairseq.compat.patience import COUNTED, counters


@wrapping
def starting_anew(self: Any, *args: Any, original: Callable[..., None], **kwargs: Any) -> None:
    """Wrap ``Trainer.__init__``, which runs once a training, before any checkpoint is loaded."""
    from fairseq import checkpoint_utils

    for function in (checkpoint_utils.save_checkpoint, *counters()):
        for name in COUNTED:
            vars(function).pop(name, None)
    original(self, *args, **kwargs)


SEVERAL_TRAININGS = Patch(
    name="several trainings",
    reason="A training that follows another in one process, as in a grid of hydra, goes on with "
    "the other's best loss and patience.",
    install=replaces({"fairseq.trainer:Trainer.__init__": starting_anew}),
)
