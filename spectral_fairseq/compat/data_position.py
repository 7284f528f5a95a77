"""A run that is resumed with another number of workers goes on at the same place in the data.

fairseq saves how many batches each worker has taken in the epoch. With fewer workers the rest of
the epoch would start too early, on batches that were trained on already; with more it would start
too late, or fail with 'dataloader mismatch'. Every worker takes each n-th batch of one list, so
that k batches of n workers are the first k * n of the list.
"""

from __future__ import annotations

from typing import Any, Callable, Dict

from spectral_fairseq.compat.patching import Patch, replaces, wrapping

_DATA_POSITION_KEY = "num_shards"


@wrapping
def saving_data_position(self: Any, *, original: Callable[..., Dict[str, Any]]) -> Dict[str, Any]:
    """Wrap ``EpochBatchIterator.state_dict`` so that the number of workers is saved."""
    return {**original(self), _DATA_POSITION_KEY: self.num_shards}


@wrapping
def restoring_data_position(
    self: Any, state: Dict[str, Any], *, original: Callable[..., None]
) -> None:
    """Wrap ``EpochBatchIterator.load_state_dict`` so that it counts in batches of this run.

    Where the number does not divide, some batches are taken twice rather than left out.
    """
    workers = state.get(_DATA_POSITION_KEY) or self.num_shards
    taken = (state.get("iterations_in_epoch") or 0) * workers
    original(self, {**state, "iterations_in_epoch": taken // self.num_shards})


DATA_POSITION = Patch(
    name="position in the data",
    reason="A run that is resumed within an epoch with another number of workers repeats batches, "
    "leaves some out, or fails with 'dataloader mismatch'.",
    install=replaces(
        {
            "fairseq.data.iterators:EpochBatchIterator.state_dict": saving_data_position,
            "fairseq.data.iterators:EpochBatchIterator.load_state_dict": restoring_data_position,
        }
    ),
)
