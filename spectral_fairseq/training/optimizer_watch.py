"""Optimisers that would decay a table three times, or train one that is no longer there.

A loop that passes ``model.parameters()`` to AdamW would decay a table of ``factor_`` three times,
and so would the groups of Trainer. An optimiser that was made before ``plain_`` holds the entries
of the table, and would leave the plain one alone. From the first such table on, torch calls the
hook before each step of every optimiser.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Iterable
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor

from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.methods.groups import undecayed_parameters

# The tables that factor_ has made, and copies: it is checked how optimisers let them decay.
FACTORED: WeakSet[SVDEmbedding] = WeakSet()
# Optimiser -> what it and the tables were like when it was checked.
_checked: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
# The attribute of a tensor that an optimiser would train for nothing: what has replaced it.
_REPLACED = "_replaced_by_spectral_fairseq"


def check_optimizer(optimizer: Any) -> None:
    """Refuse an optimiser of a table that was replaced, or that lets U or V of ``factor_`` decay.

    Raises:
        ConfigurationError: it lets them decay.
        UnsupportedError: it was made before the table that the model has.
    """
    for group in getattr(optimizer, "param_groups", ()):
        for parameter in group["params"]:
            by = getattr(parameter, _REPLACED, "")
            if by:
                raise UnsupportedError(
                    f"an optimiser that is made after {by}",
                    f"{type(optimizer).__name__} of the table before it, which would leave the "
                    "present one as it is",
                    "Make a new optimiser; Trainer does where trainer.optimizer and "
                    "trainer.lr_scheduler are None.",
                )
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
    groups = getattr(optimizer, "param_groups", ())
    now = len(FACTORED), [(len(one["params"]), one.get("weight_decay")) for one in groups]
    if _checked.get(optimizer) != now:
        check_optimizer(optimizer)
        _checked[optimizer] = now


@functools.cache
def _watch_optimizers() -> None:
    register: Any = getattr(
        importlib.import_module("torch.optim.optimizer"), "register_optimizer_step_pre_hook", None
    )
    if register is not None:  # from torch 2.0 on
        register(_before_step)


def refuse_optimizers_of(tensors: Iterable[Tensor], by: str) -> None:
    """Refuse from now on the steps of optimisers of tensors that a model does not have any more.

    Args:
        tensors: the parameters that went.
        by: the function that has replaced them.
    """
    for tensor in tensors:
        setattr(tensor, _REPLACED, by)
    _checked.clear()
    _watch_optimizers()


def watch_decay_of(table: SVDEmbedding) -> None:
    """Check from now on how optimisers let a table decay."""
    FACTORED.add(table)
    _watch_optimizers()
