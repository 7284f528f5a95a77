"""A resumed training goes on counting how long its validation has not improved.

fairseq counts for ``--patience`` in attributes of ``should_stop_early`` and saves neither, so
that after an interruption the first validation, however bad, is the best one so far.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, Iterator

from spectral_fairseq.compat.patching import Patch, replaces, wrapping

_PATIENCE_KEY = "patience"
COUNTED = ("best", "num_runs")


def counters() -> Iterator[Any]:
    """The running ``should_stop_early``; ``python -m fairseq_cli.train`` has it in __main__."""
    for name in ("__main__", "fairseq_cli.train"):
        function = getattr(sys.modules.get(name), "should_stop_early", None)
        if function is not None:
            yield function


@wrapping
def saving_patience(
    self: Any, filename: str, extra_state: Any, *, original: Callable[..., Any]
) -> Any:
    """Wrap ``Trainer.save_checkpoint`` so that the counts are saved."""
    for counter in counters():
        if hasattr(counter, "best"):
            counts = {name: getattr(counter, name) for name in COUNTED}
            extra_state = {**extra_state, _PATIENCE_KEY: counts}
    return original(self, filename, extra_state)


@wrapping
def restoring_patience(
    self: Any,
    filename: str,
    reset_optimizer: bool = False,
    reset_lr_scheduler: bool = False,
    optimizer_overrides: Any = None,
    reset_meters: bool = False,
    *,
    original: Callable[..., Any],
) -> Any:
    """Wrap ``Trainer.load_checkpoint`` so that saved counts are restored.

    As for fairseq's best loss, ``--reset-optimizer`` and ``--reset-meters`` start anew.
    """
    extra_state = original(
        self, filename, reset_optimizer, reset_lr_scheduler, optimizer_overrides, reset_meters
    )
    if not (reset_optimizer or reset_meters):
        for name, value in ((extra_state or {}).get(_PATIENCE_KEY) or {}).items():
            for counter in counters():
                setattr(counter, name, value)
    return extra_state


PATIENCE = Patch(
    name="patience",
    reason="A resumed training forgets for how long validation has not improved, so --patience "
    "counts from the start.",
    install=replaces(
        {
            "fairseq.trainer:Trainer.save_checkpoint": saving_patience,
            "fairseq.trainer:Trainer.load_checkpoint": restoring_patience,
        }
    ),
)
