"""The number of updates that a model has taken, under a name that no other plugin uses."""

from __future__ import annotations

from typing import Any

_NAME = "_spectral_fairseq_updates"


def tell_updates(model: Any, updates: int) -> None:
    """Let the criterions that see this model know how many updates it has taken."""
    setattr(model, _NAME, updates)


def updates_of(model: Any) -> int:
    """The number of updates that a model has taken; 0 until it is told."""
    return int(getattr(model, _NAME, 0))
