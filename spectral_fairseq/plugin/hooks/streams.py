"""The stateful task learns which batches are for training, and when a checkpoint is due."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, List

import torch

from spectral_fairseq.compat.patching import Patch, replaces
from spectral_fairseq.plugin.tasks.stream_iterator import StreamIterator


def _for_training(get_train_iterator: Callable[..., Any]) -> Callable[..., Any]:
    # The name of the split does not tell: one may validate on the training split, too.
    @functools.wraps(get_train_iterator)
    def get_for_training(self: Any, *args: Any, **kwargs: Any) -> Any:
        with getattr(self.task, "for_training", contextlib.nullcontext)():
            return get_train_iterator(self, *args, **kwargs)

    return get_for_training


def _gathering(save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    # Patched here, where all workers pass, and not in Trainer.consolidate_optimizer: fairseq calls
    # that also when one worker alone has failed, and the other workers would never answer.
    @functools.wraps(save_checkpoint)
    def gather_and_save(cfg: Any, trainer: Any, epoch_itr: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(epoch_itr, StreamIterator) or cfg.no_save or epoch_itr.end_of_epoch():
            return save_checkpoint(cfg, trainer, epoch_itr, *args, **kwargs)
        epoch_itr.gathered = _gathered(epoch_itr, trainer)
        epoch_itr.precision = str(next(trainer.get_model().parameters()).dtype)
        try:
            return save_checkpoint(cfg, trainer, epoch_itr, *args, **kwargs)
        finally:
            epoch_itr.gathered = None

    return gather_and_save


def _gathered(iterator: StreamIterator, trainer: Any) -> List[Any]:
    """The states of all workers, by group: see Note [Streams, slots and workers]."""
    workers = iterator.streams.workers
    own = iterator.carries.states(iterator.streams.slots)
    if workers == 1:
        return own
    by_worker: List[Any] = [None] * workers
    # Not fairseq's all_gather_list, whose buffer is on a GPU and of a fixed size.
    torch.distributed.all_gather_object(by_worker, own, group=trainer.data_parallel_process_group)
    groups = range(iterator.streams.groups)
    return [by_worker[group % workers][group // workers] for group in groups]


PATCH = Patch(
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
