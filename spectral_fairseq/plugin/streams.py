"""A corpus cut into parallel streams.

Note [Streams, slots and workers]
---------------------------------
An update reads the same stretch of all streams: from `batch_size` streams in each micro-batch,
`slots` micro-batches one after the other (--update-freq) on each of `workers` workers. Streams
that are read together form a group, and group g = slot * workers + worker. fairseq deals out
batches to the workers in turn, so every worker gets its own groups; one worker with two slots
reads the same groups as two workers with one slot; and a state that is stored by group can be
restored under any such division.
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

import numpy as np
import torch
from fairseq.data import FairseqDataset

from spectral_fairseq.errors import check_enough
from spectral_fairseq.lm.streams import ContiguousStreams
from spectral_fairseq.plugin.corpus import Corpus


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
            lengths: that of every segment; they sum to :attr:`length`, that of the longest stream.
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
