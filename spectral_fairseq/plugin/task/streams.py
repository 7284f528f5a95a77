"""A corpus cut into parallel streams, and those into segments."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, List, Sequence

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset, data_utils
from torch import Tensor

from spectral_fairseq.errors import DataError, MissingDataError
from spectral_fairseq.lm.evaluation import ContiguousStreams

# A split of a monolingual data folder as one sequence of tokens, sentence after sentence.


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
    """The sentences of a split, not yet in memory.

    Args:
        folder: written by ``fairseq-preprocess --only-source``.
        split: such as ``train``.
        dictionary: of the words.
        kind: ``--dataset-impl``.
        combine: go on with ``train1``, ``train2`` and so on.

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
        if len(corpus) < count:
            raise DataError(
                f"at least one token for each of {count} streams (--batch-size {batch_size} x "
                f"--update-freq {slots} x {workers} workers)",
                f"a corpus of {len(corpus)} tokens",
                "Use fewer streams, --update-freq or workers, or more text.",
            )
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
    """Cut a stream into segments of one length.

    Args:
        total: tokens of the stream.
        length: tokens of a segment.

    Returns:
        Lengths that sum to ``total``: all ``length``, but for the last one.
    """
    return _cut(total, min(length, SHORTEST), lambda: length)


def sampled_lengths(total: int, length: int, generator: np.random.Generator) -> List[int]:
    """Cut a stream into segments whose length is drawn for each of them.

    ``max(5, floor(x))`` with ``x ~ N(b, 5^2)``, where ``b`` is ``length`` with probability 0.95
    and half of it otherwise.

    Args:
        total: tokens of the stream.
        length: L, the usual length.
        generator: source of randomness.

    Returns:
        Lengths that sum to ``total``.
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
