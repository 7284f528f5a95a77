"""The position of training in its streams, with the carried states; saved and restored."""

from __future__ import annotations

import bisect
import logging
import weakref
from typing import Any, Dict, List, Optional

from fairseq.data.iterators import EpochBatchIterator

from spectral_fairseq.plugin.tasks.slot_carries import SlotCarries
from spectral_fairseq.plugin.tasks.streams import Streams

logger = logging.getLogger(__name__)

# Note [States in the iterator's state]
# fairseq saves a task's state, but never gives it back to the task in training. It gives the
# iterator's state back to every worker, and drops it with --reset-dataloader and
# --finetune-from-model, which is right for states that belong to a position in the data. A single
# worker writes the checkpoint, so the states of all workers are gathered first (hooks/streams.py).


class StreamIterator(EpochBatchIterator):
    """The micro-batches of one epoch for one worker, in order.

    Args:
        streams: the streams to read.
        shard_id: number of this worker.
        epoch: from 1.
        num_workers: processes that load data.
        buffer_size: micro-batches to keep ready.
    """

    def __init__(
        self, streams: Streams, shard_id: int, epoch: int, num_workers: int, buffer_size: int
    ) -> None:
        super().__init__(
            dataset=streams,
            collate_fn=streams.collater,
            batch_sampler=[[index] for index in range(len(streams))],
            num_shards=streams.workers,
            shard_id=shard_id,
            num_workers=num_workers,
            epoch=epoch,
            buffer_size=buffer_size,
            disable_shuffling=True,
        )
        # fairseq's sampler keeps this method, which would make a reference cycle. The garbage
        # collector would end the loading processes late, and, because it closes their queues first,
        # only after waiting 5 seconds for each of them.
        known = weakref.ref(self)
        self.ordered_batches = lambda *given: EpochBatchIterator.ordered_batches(known(), *given)
        # An iterator serves one epoch; its loading processes would live on with the flag set.
        self.persistent_workers = False
        self.streams = streams
        self.carries = SlotCarries()
        self.gathered: Optional[List[Any]] = None
        self.precision: Optional[str] = None

    def state_dict(self) -> Dict[str, Any]:
        """fairseq's entries and, within an epoch, ``streams`` with the states by group."""
        state = super().state_dict()
        if state["iterations_in_epoch"] > 0:
            segment = state["iterations_in_epoch"] // self.streams.slots
            state["streams"] = {
                **self._layout(segment),
                "segment": segment,
                "states": self.gathered,
                "precision": self.precision,
            }
        return state

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Go to a saved position and take this worker's states from it.

        If the streams have changed since, go to the same share of the epoch and start them there
        with fresh states, with a warning.

        Args:
            state_dict: what :meth:`state_dict` returned, in any worker.
        """
        self.carries.reset()
        segment = 0
        if state_dict.get("iterations_in_epoch", 0) > 0:
            segment = self._restore(state_dict.get("streams"))
        super().load_state_dict(
            {
                "version": 2,
                "epoch": state_dict["epoch"],
                "iterations_in_epoch": segment * self.streams.slots,
                "shuffle": False,
            }
        )

    def _restore(self, saved: Optional[Dict[str, Any]]) -> int:
        if saved is None:
            logger.warning(
                "expected a checkpoint of the task stateful_language_modeling, found the position "
                "of another task: its epoch starts from the beginning"
            )
            return 0
        streams = self.streams
        segment = int(saved["segment"])
        found = self._layout(min(segment, len(streams.starts) - 1))
        changed = [key for key, value in found.items() if saved[key] != value]
        if changed:
            share = saved["start"] / saved["stream_length"]
            at = bisect.bisect_left(streams.starts, share * streams.length)
            segment = min(at, len(streams.starts) - 1)
            were = ", ".join(f"{key} was {saved[key]}, is {found[key]}" for key in changed)
            logger.warning(
                f"the streams start afresh, without carried state, at {100 * share:.1f} % of the "
                f"epoch, because they are not those of the checkpoint: {were}"
            )
        elif saved["states"] is None:
            logger.warning("the checkpoint holds no carried states: the streams start afresh")
        else:
            groups = range(self.shard_id, streams.groups, streams.workers)
            self.carries.restore([saved["states"][group] for group in groups])
            self.precision = saved["precision"]
        return segment

    def _layout(self, segment: int) -> Dict[str, int]:
        return {
            "batch_size": self.streams.batch_size,
            "groups": self.streams.groups,
            "stream_length": self.streams.length,
            "start": self.streams.starts[segment],
        }
