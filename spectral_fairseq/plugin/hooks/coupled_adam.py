"""``--optimizer coupled_adam`` is told which parameters are tables, before the first step.

fairseq builds an optimiser from parameters without names.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.lm.coupled_adam import CoupledAdam
from spectral_fairseq.plugin.optim.coupled_adam import couple_tables


def _telling_tables(begin_epoch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin_epoch)
    def tell_and_begin(self: Any, epoch: int) -> Any:
        inner = self.optimizer.optimizer
        if isinstance(inner, CoupledAdam):
            couple_tables(self.optimizer, self.get_model())
        if isinstance(getattr(inner, "optim", None), CoupledAdam):
            raise UnsupportedError(
                "coupled_adam to hold whole tables",
                "--zero-sharding os, which splits its state",
                "Drop --zero-sharding, or use --optimizer adam.",
            )
        parts = getattr(inner, "optimizers", {})
        if any(isinstance(part.optimizer, CoupledAdam) for part in parts.values()):
            raise UnsupportedError(
                "coupled_adam for all parameters",
                "--optimizer composite with coupled_adam among its groups",
                "Use --optimizer coupled_adam, or adam in that group.",
            )
        return begin_epoch(self, epoch)

    return tell_and_begin


PATCH = Patch(
    name="tables of coupled_adam",
    reason="--optimizer coupled_adam averages second moments over the rows of tables, and fairseq "
    "does not tell an optimiser which of its parameters are tables.",
    install=replaces({"fairseq.trainer:Trainer.begin_epoch": _telling_tables}),
)
