"""A split of binarised text as one sequence of tokens."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset, data_utils
from torch import Tensor

from spectral_fairseq.errors import MissingDataError

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
