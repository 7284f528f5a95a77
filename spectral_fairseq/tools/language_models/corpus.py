"""Binarised monolingual corpora of fairseq as one long sequence of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, Union

import numpy as np
import torch
from fairseq.data import data_utils, indexed_dataset
from torch import Tensor

from spectral_fairseq.compat.indexed_files import check_indexed_files
from spectral_fairseq.errors import ConfigurationError, DataError, MissingDataError

MADE_BY_PREPROCESS = ("train", "valid", "test")


class IndexedCorpus:
    """The sentences of a binarised split in a row; tokens are read from the disk when asked for.

    Args:
        dataset: one that ``fairseq-preprocess`` wrote; each sentence ends with its end symbol.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._ends = np.cumsum(np.asarray(dataset.sizes, dtype=np.int64))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, where: slice) -> Tensor:
        """The tokens of a slice with positive step 1, shape (n,), int64."""
        first, end, _ = where.indices(len(self))
        parts = [torch.zeros(0, dtype=torch.long)]
        sentence = int(np.searchsorted(self._ends, first, side="right"))
        while first < end:
            tokens = self._dataset[sentence].long()
            begin = int(self._ends[sentence]) - len(tokens)
            parts.append(tokens[first - begin : end - begin])
            first = int(self._ends[sentence])
            sentence += 1
        return torch.cat(parts)


def splits_in(data: Union[str, Path]) -> List[str]:
    """Names of the monolingual splits in a folder of binarised data."""
    return sorted(path.stem for path in Path(data).glob("*.idx") if "." not in path.stem)


def open_corpus(
    data: Union[str, Path], split: str, dictionary: Any, combine: bool = False
) -> IndexedCorpus:
    """Open a split that ``fairseq-preprocess --only-source`` wrote.

    Args:
        data: its folder.
        split: such as ``valid``.
        dictionary: the one it was binarised with.
        combine: append the split's further files, ``train1``, ``train2``, ..., as training does.

    Raises:
        ConfigurationError: a name that no split has, such as a path.
        MissingDataError: there is no such split.
        DataError: the split is damaged, or holds no token.
    """
    if not split or Path(split).name != split:
        raise ConfigurationError(
            "the name of a split, such as valid", repr(split), "Correct --gen-subset."
        )
    prefix = str(Path(data) / split)
    check_indexed_files(prefix, len(dictionary))
    kind = indexed_dataset.infer_dataset_impl(prefix)
    if kind is None:
        there = splits_in(data)
        raise MissingDataError(
            f"the split {split!r} of a monolingual corpus in {data}",
            f"the splits {', '.join(there)}" if there else "no monolingual split",
            f"Name one of those, or binarise it: fairseq-preprocess --only-source --srcdict "
            f"{data}/dict.txt --{split}pref TEXT --destdir {data}."
            if split in MADE_BY_PREPROCESS
            else "Name one of those; fairseq-preprocess makes the splits train, valid and test.",
        )
    # fairseq's old format; its reader "cached" would keep in memory what has been read.
    kind = "lazy" if kind == "cached" else kind
    dataset = data_utils.load_indexed_dataset(prefix, dictionary, kind, combine=combine)
    corpus = IndexedCorpus(dataset)
    if len(corpus) == 0:
        raise DataError(
            f"at least one token in the split {split!r} in {data}",
            "none",
            "Check the text that it was binarised from.",
        )
    return corpus
