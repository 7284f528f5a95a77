"""A run that is resumed with another number of workers goes on at the same place in the data.

fairseq saves how many batches each worker has taken in the epoch. With fewer workers the rest of
the epoch would start too early, on batches that were trained on already; with more it would start
too late, or fail with 'dataloader mismatch'. Every worker takes each n-th batch of one list, so
that k batches of n workers are the first k * n of the list.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict

from spectral_fairseq.compat.patching import Patch, replaces

_KEY = "num_shards"


def saving(state_dict: Callable[..., Dict[str, Any]]) -> Callable[..., Dict[str, Any]]:
    """Wrap ``EpochBatchIterator.state_dict`` so that the number of workers is saved."""

    @functools.wraps(state_dict)
    def state_with_workers(self: Any) -> Dict[str, Any]:
        return {**state_dict(self), _KEY: self.num_shards}

    return state_with_workers


def restoring(load_state_dict: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``EpochBatchIterator.load_state_dict`` so that it counts in batches of this run.

    Where the number does not divide, some batches are taken twice rather than left out.
    """

    @functools.wraps(load_state_dict)
    def load_position(self: Any, state: Dict[str, Any]) -> None:
        workers = state.get(_KEY) or self.num_shards
        taken = (state.get("iterations_in_epoch") or 0) * workers
        load_state_dict(self, {**state, "iterations_in_epoch": taken // self.num_shards})

    return load_position


PATCH = Patch(
    name="position in the data",
    reason="A run that is resumed within an epoch with another number of workers repeats batches, "
    "leaves some out, or fails with 'dataloader mismatch'.",
    install=replaces(
        {
            "fairseq.data.iterators:EpochBatchIterator.state_dict": saving,
            "fairseq.data.iterators:EpochBatchIterator.load_state_dict": restoring,
        }
    ),
)
