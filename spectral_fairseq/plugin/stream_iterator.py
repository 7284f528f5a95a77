"""The position of training in its streams, with the carried states; saved and restored.

The stateful task learns here which batches are for training, and when a checkpoint is due.

Note [States in the iterator's state]
-------------------------------------
fairseq saves a task's state, but never gives it back to the task in training. It gives the
iterator's state back to every worker, and drops it with --reset-dataloader and
--finetune-from-model, which is right for states that belong to a position in the data. A single
worker writes the checkpoint, so the states of all workers are gathered first.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from fairseq.data.iterators import EpochBatchIterator

from spectral_fairseq.compat.patching import Patch, replaces, wrapping
from spectral_fairseq.lm.carry import Carry
from spectral_fairseq.plugin.streams import Streams

logger = logging.getLogger(__name__)


class SlotCarries:
    """Hands out the carry that a micro-batch continues."""

    def __init__(self) -> None:
        self._carries: Dict[int, Carry] = {}
        self._before: Dict[int, Tuple[int, Any]] = {}

    def reset(self) -> None:
        """Forget all states."""
        self._carries.clear()
        self._before.clear()

    def at(self, slot: int, segment: int) -> Carry:
        """The carry for one micro-batch, in the state that the micro-batch starts from.

        The first segment starts with a fresh state. fairseq feeds a micro-batch a second time after
        some failures (overflow under --amp, out of memory in validation); it then starts from the
        same state as the first time.
        """
        carry = self._carries.setdefault(slot, Carry())
        if segment == 0:
            carry.reset()
        elif self._before.get(slot, (None, None))[0] == segment:
            carry.state = self._before[slot][1]
        self._before[slot] = (segment, carry.state)
        return carry

    def states(self, slots: int) -> List[Any]:
        """Copies on the CPU of the states of ``slots`` slots."""
        carries = [self._carries.get(slot, Carry()) for slot in range(slots)]
        return [_mapped(carry.state, lambda x: x.detach().cpu().clone()) for carry in carries]

    def restore(self, states: List[Any]) -> None:
        """Continue from what :meth:`states` returned."""
        self.reset()
        self._carries = {slot: Carry(state) for slot, state in enumerate(states)}

    def to(self, device: torch.device) -> None:
        """Move all states."""
        for carry in self._carries.values():
            carry.state = _mapped(carry.state, lambda x: x.to(device))


def _mapped(state: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if torch.is_tensor(state):
        return function(state)
    if isinstance(state, dict):
        return {key: _mapped(value, function) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_mapped(value, function) for value in state)
    return state


class StreamIterator(EpochBatchIterator):
    """The micro-batches of one epoch for one worker, in order."""

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
        self.ordered_batches = lambda *args: EpochBatchIterator.ordered_batches(known(), *args)
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
        layout = self._layout(min(segment, len(streams.starts) - 1))
        changed = [key for key, value in layout.items() if saved[key] != value]
        if changed:
            share = saved["start"] / saved["stream_length"]
            at = bisect.bisect_left(streams.starts, share * streams.length)
            segment = min(at, len(streams.starts) - 1)
            were = ", ".join(f"{key} was {saved[key]}, is {layout[key]}" for key in changed)
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


@wrapping
def _for_training(self: Any, *args: Any, original: Callable[..., Any], **kwargs: Any) -> Any:
    # The name of the split does not tell: one may validate on the training split, too.
    with getattr(self.task, "for_training", contextlib.nullcontext)():
        return original(self, *args, **kwargs)


@wrapping
def _gathering(
    cfg: Any, trainer: Any, epoch_itr: Any, *args: Any, original: Callable[..., Any], **kwargs: Any
) -> Any:
    # Patched here, where all workers pass, and not in Trainer.consolidate_optimizer: fairseq calls
    # that also when one worker alone has failed, and the other workers would never answer. For the
    # same reason --no-save is not asked: it may be a flag of all workers but the first.
    if not isinstance(epoch_itr, StreamIterator) or epoch_itr.end_of_epoch():
        return original(cfg, trainer, epoch_itr, *args, **kwargs)
    epoch_itr.gathered = _gathered(epoch_itr, trainer)
    epoch_itr.precision = str(next(trainer.get_model().parameters()).dtype)
    try:
        return original(cfg, trainer, epoch_itr, *args, **kwargs)
    finally:
        epoch_itr.gathered = None


def _gathered(iterator: StreamIterator, trainer: Any) -> List[Any]:
    """The states of all workers, by group: see Note [Streams, slots and workers]."""
    workers = iterator.streams.workers
    states = iterator.carries.states(iterator.streams.slots)
    if workers == 1:
        return states
    by_worker: List[Any] = [None] * workers
    # Not fairseq's all_gather_list, whose buffer is on a GPU and of a fixed size.
    torch.distributed.all_gather_object(
        by_worker, states, group=trainer.data_parallel_process_group
    )
    groups = range(iterator.streams.groups)
    return [by_worker[group % workers][group // workers] for group in groups]


STREAMS = Patch(
    name="streams of the stateful task",
    reason="--task stateful_language_modeling needs to know which batches are for training, and "
    "saves the states of all workers in each checkpoint.",
    install=replaces(
        {
            "fairseq.trainer:Trainer.get_train_iterator": _for_training,
            "fairseq.checkpoint_utils:save_checkpoint": _gathering,
        }
    ),
)
