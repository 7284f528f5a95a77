"""A corpus cut into parallel streams, and the position of a training in them."""

from __future__ import annotations

import bisect
import contextlib
import logging
import os
import weakref
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset, data_utils
from fairseq.data.iterators import EpochBatchIterator
from torch import Tensor

from spectral_fairseq.compat.patching import Patch, replaces, wrapping
from spectral_fairseq.errors import MissingDataError, check_enough
from spectral_fairseq.lm.awd_lstm import Carry
from spectral_fairseq.lm.streams import ContiguousStreams

logger = logging.getLogger(__name__)


# The number of sentences that are joined at a time: joining millions of small arrays at once would
# need twice the memory.
_BLOCK = 10_000


class Corpus(FairseqDataset):
    """All sentences of a split in their order, each ending as ``fairseq-preprocess`` left it.

    The tokens are held in memory, four bytes each, because every segment touches all streams: a
    read from the disk for each of them would take longer than a small language model.

    Args:
        sentences: one-dimensional tensors of word indices.
        first_input: what is read before the first token: the end of the sentence before.

    Attributes:
        tokens: ``first_input`` and then every token, shape (1 + number of tokens,).
    """

    def __init__(self, sentences: Any, first_input: int) -> None:
        pieces = [np.asarray([first_input], dtype=np.int32)]
        for start in range(0, len(sentences), _BLOCK):
            block = range(start, min(start + _BLOCK, len(sentences)))
            tokens = np.concatenate([sentences[index].numpy() for index in block])
            pieces.append(tokens.astype(np.int32))
        self.tokens = torch.from_numpy(np.concatenate(pieces))

    def __len__(self) -> int:
        """Number of tokens, each of them once a target."""
        return len(self.tokens) - 1

    def __getitem__(self, index: int) -> Tensor:
        """The token at ``index``."""
        return self.tokens[1 + index]


def sentences_in(folder: str, split: str, dictionary: Dictionary, kind: Any, combine: bool) -> Any:
    """The sentences of a split of ``fairseq-preprocess --only-source``, not yet in memory.

    With ``combine`` they go on with ``train1``, ``train2`` and so on.

    Raises:
        MissingDataError: no such split.
    """
    prefix = os.path.join(folder, split)
    sentences = data_utils.load_indexed_dataset(prefix, dictionary, kind, combine=combine)
    if sentences is None:
        raise MissingDataError(
            f"the split '{split}' in the data folder {folder}",
            f"no {prefix}.idx",
            "Give the name of a split that exists (--train-subset, --valid-subset), or "
            "prepare it with fairseq-preprocess --only-source.",
        )
    return sentences


# Note [Streams, slots and workers]
# An update reads the same stretch of all streams: from `batch_size` streams in each micro-batch,
# `slots` micro-batches one after the other (--update-freq) on each of `workers` workers. Streams
# that are read together form a group, and group g = slot * workers + worker. fairseq deals out
# batches to the workers in turn, so every worker gets its own groups; one worker with two slots
# reads the same groups as two workers with one slot; and a state that is stored by group can be
# restored under any such division.


class Streams(FairseqDataset):
    """Micro-batches in the order in which an epoch goes through them.

    Item ``segment * groups + group`` is the micro-batch of one group of streams. See
    Note [Streams, slots and workers].

    Args:
        corpus: the tokens to cut into streams.
        batch_size: B, streams of a micro-batch.
        slots: micro-batches that a worker reads in one update.
        workers: workers that share the corpus.
        pad: index of the padding word.
        trim: leave out the last tokens so that all streams have equally many, as training does;
            otherwise no token is left out, and some streams are one token longer than others.

    Raises:
        DataError: fewer tokens than streams.
    """

    def __init__(
        self, corpus: Corpus, batch_size: int, slots: int, workers: int, pad: int, trim: bool
    ) -> None:
        self.batch_size, self.slots, self.workers = batch_size, slots, workers
        self.groups = slots * workers
        count = self.groups * batch_size
        product = f"--batch-size {batch_size} x --update-freq {slots} x {workers} workers"
        what = f"tokens in the corpus, one for each stream ({product})"
        check_enough(len(corpus), count, what, "Use fewer of them, or more text.")
        self._pad = pad
        self.trimmed = len(corpus) % count if trim else 0
        tokens = corpus.tokens[1 : 1 + len(corpus) - self.trimmed]
        self._streams = ContiguousStreams(tokens, count, pad, start=int(corpus.tokens[0]))
        self.length = self._streams.length
        self.cut([self.length])

    def cut(self, lengths: Sequence[int]) -> None:
        """Choose the segments.

        Args:
            lengths: of every segment; they sum to :attr:`length`, that of the longest stream.
        """
        if sum(lengths) != self.length:
            raise ValueError(f"segments of {sum(lengths)} tokens, streams of {self.length}")
        self.lengths = list(lengths)
        self.starts = [0, *np.cumsum(self.lengths[:-1]).tolist()]

    def __len__(self) -> int:
        """Number of micro-batches, those of all workers together."""
        return len(self.lengths) * self.groups

    def __getitem__(self, index: int) -> Dict[str, Any]:
        """One micro-batch, shapes (B, T).

        ``segment`` and ``slot`` say whose state it continues.
        """
        segment, group = divmod(index, self.groups)
        rows = range(group * self.batch_size, (group + 1) * self.batch_size)
        piece = self._streams.segment(self.starts[segment], self.lengths[segment], rows)
        lengths = piece.targets.ne(self._pad).sum(dim=1)
        return {
            "id": torch.tensor(rows) + segment * self.groups * self.batch_size,
            "nsentences": self.batch_size,
            "ntokens": int(lengths.sum()),
            "net_input": {"src_tokens": piece.tokens, "src_lengths": lengths},
            "target": piece.targets,
            "segment": segment,
            "slot": group // self.workers,
        }

    def collater(self, samples: List[Dict[str, Any]]) -> Dict[str, Any]:
        """An item is a whole micro-batch already."""
        (sample,) = samples
        return sample


# The lengths of the segments through which gradients are propagated back in time (BPTT).
#
# Merity, Keskar, Socher: "Regularizing and Optimizing LSTM Language Models", ICLR 2018, section
# 4.1, https://arxiv.org/abs/1708.02182. A new length for every update lets each token's gradient
# reach back over a different distance in each epoch.


SHORTEST = 5
FULL_LENGTH_PROBABILITY = 0.95
STANDARD_DEVIATION = 5.0


def fixed_lengths(total: int, length: int) -> List[int]:
    """Lengths of a stream's segments, which sum to ``total``; all but the last are ``length``."""
    return _cut(total, min(length, SHORTEST), lambda: length)


def sampled_lengths(total: int, length: int, generator: np.random.Generator) -> List[int]:
    """Cut a stream into segments whose length is drawn for each of them.

    ``max(5, floor(x))`` with ``x ~ N(b, 5^2)``, where ``b`` is ``length`` with probability 0.95
    and half of it otherwise.

    Returns:
        Lengths that sum to ``total``, the tokens of the stream.
    """

    def draw() -> int:
        base = length if generator.random() < FULL_LENGTH_PROBABILITY else length / 2
        return max(SHORTEST, int(generator.normal(base, STANDARD_DEVIATION)))

    return _cut(total, SHORTEST, draw)


def _cut(total: int, shortest: int, draw: Callable[[], int]) -> List[int]:
    # A remainder below `shortest` joins the segment before it: an update from one or two tokens
    # would be noise, and streams that are one token shorter than others would have no token in it.
    lengths = []
    left = total
    while left > 0:
        length = min(draw(), left)
        if left - length < max(2, shortest):
            length = left
        lengths.append(length)
        left -= length
    return lengths


# The position of training in its streams, with the carried states; saved and restored.


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


# Note [States in the iterator's state]
# fairseq saves a task's state, but never gives it back to the task in training. It gives the
# iterator's state back to every worker, and drops it with --reset-dataloader and
# --finetune-from-model, which is right for states that belong to a position in the data. A single
# worker writes the checkpoint, so the states of all workers are gathered first (streams.py).


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


# The stateful task learns which batches are for training, and when a checkpoint is due.


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
    # that also when one worker alone has failed, and the other workers would never answer.
    if not isinstance(epoch_itr, StreamIterator) or cfg.no_save or epoch_itr.end_of_epoch():
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
