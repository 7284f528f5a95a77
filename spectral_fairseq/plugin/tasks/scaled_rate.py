"""A context in which an optimiser has another learning rate."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator


@contextlib.contextmanager
def scaled_rate(optimizer: Any, factor: float) -> Iterator[None]:
    """Multiply all learning rates, and restore them afterwards, whatever happens.

    Args:
        optimizer: of fairseq, wrapped for half precision or not.
        factor: factor of the learning rates.
    """
    groups = list(optimizer.param_groups)
    rates = [group["lr"] for group in groups]
    for group, rate in zip(groups, rates):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(groups, rates):
            group["lr"] = rate
