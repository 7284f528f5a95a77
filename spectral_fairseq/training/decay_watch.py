"""The tables of ``factor_`` that exist, and how optimisers let them decay.

A loop that passes ``model.parameters()`` to AdamW would decay a table three times, and so would the
groups of Trainer. From the first such table on, torch calls the hook before each step of every
optimiser.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.methods.groups import undecayed_parameters

# The tables that factor_ has made, and copies: it is checked how optimisers let them decay.
FACTORED: WeakSet[SVDEmbedding] = WeakSet()
# Optimiser -> what it and the tables were like when it was checked.
_checked: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def check_decay(optimizer: Any) -> None:
    """Refuse an optimiser that lets U or V of a table of ``factor_`` decay.

    Raises:
        ConfigurationError: it does.
    """
    for group in getattr(optimizer, "param_groups", ()):
        if not group.get("weight_decay"):
            continue
        held = {id(parameter) for parameter in group["params"]}
        if any(
            id(parameter) in held for table in FACTORED for parameter in undecayed_parameters(table)
        ):
            raise ConfigurationError(
                "a weight decay that acts on a table of factor_ once, on its sigma",
                f"{type(optimizer).__name__} with weight_decay {group['weight_decay']:g} for U, V "
                "and sigma alike, which would act three times",
                "Make the optimiser from spectral_fairseq.training.parameter_groups(model, lr=..., "
                "weight_decay=...); for Trainer pass optimizers=(that optimiser, None).",
            )


def _before_step(optimizer: Any, *_: Any) -> None:
    if not FACTORED:
        return
    groups = getattr(optimizer, "param_groups", ())
    now = len(FACTORED), [(len(one["params"]), one.get("weight_decay")) for one in groups]
    if _checked.get(optimizer) != now:
        check_decay(optimizer)
        _checked[optimizer] = now


@functools.cache
def _watch_optimizers() -> None:
    register: Any = getattr(
        importlib.import_module("torch.optim.optimizer"), "register_optimizer_step_pre_hook", None
    )
    if register is not None:  # from torch 2.0 on
        register(_before_step)


def watch_decay_of(table: SVDEmbedding) -> None:
    """Check from now on how optimisers let a table decay."""
    FACTORED.add(table)
    _watch_optimizers()
