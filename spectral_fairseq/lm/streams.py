"""A corpus as contiguous streams that are read side by side, segment by segment.

A corpus is one long sequence x_1 .. x_n. The token before x_1 is an end of sentence, which itself
is not predicted.

Flags: ``--tokens-per-sample`` 70, ``--variable-bptt`` off.
In order: ``plugin/streams.py``, ``ContiguousStreams``, ``Segment``.

Note [How a corpus is cut]
--------------------------
A model with a state reads B contiguous streams side by side, segment by segment, and carries its
state from each segment to the next. Stream b holds the tokens b n / B .. (b + 1) n / B, rounded
down, so some streams are one token longer than others, whose ends are padded. The first input of
a stream is the token that precedes it in the corpus, but its first state is empty: this is the
cost of B > 1. Training, validation and ``evaluate-lm`` all use this module, so their figures are
equal if B and the segments are. A last segment of fewer than five tokens is joined to the one
before in training and validation only, which changes what a Transformer-XL remembers of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spectral_fairseq.errors import check_enough

Corpus = Any
"""``len(corpus)`` tokens, of which ``corpus[a:b]`` is a tensor of integers; it can be a tensor."""


@dataclass
class Segment:
    """A piece of a corpus in the form in which a model reads it.

    Attributes:
        tokens: inputs, shape (R, S).
        targets: the token after each, shape (R, S); padding where nothing is predicted.
    """

    tokens: Tensor
    targets: Tensor


class ContiguousStreams:
    """The streams of a corpus; see Note [How a corpus is cut].

    Args:
        corpus: n tokens.
        streams: B.
        padding: index of the padding symbol.
        start: index of the token that precedes the corpus.

    Attributes:
        length: number of tokens of the longest stream.

    Raises:
        DataError: the corpus has fewer tokens than streams.
    """

    def __init__(self, corpus: Corpus, streams: int, padding: int, start: int) -> None:
        total = len(corpus)
        check_enough(total, streams, "tokens, one for each stream", "Use fewer streams.")
        self.corpus, self.padding, self.start = corpus, padding, start
        # Where each stream starts, and where the last one ends.
        self.bounds = [stream * total // streams for stream in range(streams + 1)]
        self.length = -(-total // streams)

    def segment(self, begin: int, size: int, rows: range) -> Segment:
        """Return the tokens ``begin`` .. ``begin + size`` of some streams, shape (R, size).

        Args:
            begin: position in each stream.
            size: number of tokens; streams that end before are padded.
            rows: the streams, R of them.
        """
        starts = torch.tensor([self.bounds[row] + begin for row in rows])
        ends = torch.tensor([self.bounds[row + 1] for row in rows])
        both = torch.stack([self._around(first, size) for first in starts.tolist()]).long()
        outside = starts.unsqueeze(1) + torch.arange(size) >= ends.unsqueeze(1)  # [R, size]
        return Segment(
            both[:, :-1].masked_fill(outside, self.padding),
            both[:, 1:].masked_fill(outside, self.padding),
        )

    def _around(self, first: int, size: int) -> Tensor:
        """Return ``size`` tokens from ``first`` on and the one before them, shape (size + 1,)."""
        piece = self.corpus[max(first - 1, 0) : first + size]
        before = [self.start] if first == 0 else []
        after = [self.padding] * (size + 1 - len(before) - len(piece))
        return torch.cat([piece.new_tensor(before), piece, piece.new_tensor(after)])
