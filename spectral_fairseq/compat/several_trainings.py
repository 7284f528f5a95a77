"""A later training of the same process begins anew, as the trainings of a hydra grid do.

fairseq keeps the best validation loss, and how often it was missed for ``--patience``, in
attributes of two functions. A training that follows another in one process would go on with them:
it would have no ``checkpoint_best.pt`` and end early.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.compat.patience import COUNTED, counters


def starting_anew(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``Trainer.__init__``, which runs once a training, before any checkpoint is loaded."""

    @functools.wraps(init)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        from fairseq import checkpoint_utils

        for function in (checkpoint_utils.save_checkpoint, *counters()):
            for name in COUNTED:
                vars(function).pop(name, None)
        init(self, *args, **kwargs)

    return start


PATCH = Patch(
    name="several trainings",
    reason="A training that follows another in one process, as in a grid of hydra, goes on with "
    "the other's best loss and patience.",
    install=replaces({"fairseq.trainer:Trainer.__init__": starting_anew}),
)
