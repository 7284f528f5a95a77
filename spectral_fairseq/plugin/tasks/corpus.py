"""A split as one sequence of tokens, sentence after sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fairseq.data import FairseqDataset
from torch import Tensor

# Sentences turned into one array at a time: millions of small ones would need twice the memory.
_BLOCK = 10_000


class Corpus(FairseqDataset):
    """All sentences of a split in their order, each ending as ``fairseq-preprocess`` left it.

    Held in memory, four bytes a token, because every segment touches all streams: reads all
    over the file would cost more than the model of a small language model does.

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
