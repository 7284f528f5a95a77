"""Load a language model from a checkpoint, or explain why it cannot be evaluated."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Union

import numpy as np
import torch
from fairseq import checkpoint_utils
from fairseq.data import data_utils, indexed_dataset
from fairseq.models import FairseqLanguageModel
from torch import Tensor

import spectral_fairseq.plugin  # noqa: F401  registers the architectures that a checkpoint names
from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.checkpoints.settings import checkpoint_settings, data_folder_in
from spectral_fairseq.commands.overrides import check_overrides
from spectral_fairseq.compat.indexed_files import check_indexed_files
from spectral_fairseq.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    MissingDataError,
    SpectralFairseqError,
    UnsupportedError,
    check_enough,
    check_type,
    first_line,
    listed,
)
from spectral_fairseq.files import check_file
from spectral_fairseq.provenance import Noted, sha256


@dataclass
class LanguageModel:
    """The model of a checkpoint and how it was trained.

    Attributes:
        model: in evaluation mode, float32.
        dictionary: of the data.
        stateful: whether it passes a state from one segment to the next.
        arch: name of its architecture.
        settings: settings of its task, with the overrides.
        sha256: hash of the checkpoint.
        dictionary_sha256: hash of dict.txt.
        remark: why the dictionary may be the wrong one; None if nothing suggests it.
    """

    model: Any
    dictionary: Any
    stateful: bool
    arch: str
    settings: Dict[str, Any]
    sha256: str
    dictionary_sha256: str
    remark: Optional[str]

    @property
    def padding(self) -> int:
        """Index of the padding symbol."""
        return int(self.dictionary.pad())

    @property
    def start(self) -> int:
        """Index of the symbol that precedes a corpus, the end of a sentence."""
        return int(self.dictionary.eos())


def by_eval_lm(*flags: str) -> str:
    """The remedy for a model that fairseq itself evaluates; its task asks for ``flags`` again."""
    command = "fairseq-eval-lm DATA --user-dir spectral_fairseq --path CKPT"
    more = ("--tokens-per-sample T", "--context-window C", *flags)
    return f"Evaluate it with {' '.join((command, *more))}."


def load_language_model(
    path: Union[str, Path],
    data: Union[str, Path],
    overrides: Mapping[str, Any],
    verify: bool = True,
) -> LanguageModel:
    """Build the model of a checkpoint, on the CPU."""
    words = Path(data) / "dict.txt"
    read = Noted.of(path), Noted.of(words)
    checkpoint = load_checkpoint(path, verify)
    names = set(checkpoint["model"])
    has_encoder = any(name.startswith("encoder.") for name in names)
    if has_encoder or not any(name.startswith("decoder.") for name in names):
        raise CheckpointError(
            f"a language model, which is a decoder alone, in {path}",
            "a model with an encoder" if has_encoder else "a model without a decoder",
            "Give a checkpoint of --task language_modeling or stateful_language_modeling; "
            "translation models are scored by fairseq-generate --score-reference.",
        )
    check_overrides(checkpoint, overrides)
    remedy = "Give the folder that fairseq-preprocess --only-source wrote to --destdir."
    check_file(words, "a dictionary", remedy)
    settings = {**checkpoint_settings(checkpoint, "task"), **overrides}
    for flag in ("--add-bos-token", "--self-target", "--past-target"):
        if settings.get(flag[2:].replace("-", "_")):
            wanted = "a language model of the next token, whose text starts with </s>"
            raise UnsupportedError(wanted, f"one trained with {flag}", by_eval_lm(flag))
    arch = str(checkpoint_settings(checkpoint, "model").get("_name"))
    remark = _remark(settings, words)
    del checkpoint  # fairseq reads it again
    model, task = load_model_and_task(path, data, overrides)
    remedy = "Give a checkpoint of --task language_modeling or stateful_language_modeling."
    what = f"a language model in {path}"
    check_type(model, FairseqLanguageModel, what, remedy, CheckpointError)
    dictionary, target_dictionary = task.source_dictionary, task.target_dictionary
    if len(target_dictionary) != len(dictionary):
        flag = f"--output-dictionary-size {len(target_dictionary)}"
        found = f"{len(dictionary)} words, of which it writes {len(target_dictionary)}"
        raise UnsupportedError("one dictionary for input and output", found, by_eval_lm(flag))
    loaded = LanguageModel(
        model.float().eval(),
        dictionary,
        bool(getattr(model, "stateful", False)),
        arch,
        settings,
        sha256(path),
        sha256(words),
        remark,
    )
    for noted in read:
        noted.check()
    return loaded


def load_model_and_task(path: Any, data: Any, overrides: Mapping[str, Any]) -> Any:
    """The model of a checkpoint, of any kind, and its task, as fairseq builds them."""
    try:
        models, _, task = checkpoint_utils.load_model_ensemble_and_task(
            [str(path)], arg_overrides={**overrides, "data": str(data)}
        )
    except SpectralFairseqError:
        raise  # by the models and tasks of this package; it says what to correct
    except Exception as error:  # fairseq, omegaconf and the data have errors of many classes
        text = str(error)
        if "size mismatch" in text or "Missing key" in text or "Unexpected key" in text:
            lines = [line.strip() for line in text.splitlines()[1:]]
            raise DataError(
                f"parameters in {path} that fit the dictionary in {data}",
                (lines or [text])[0].rstrip("."),
                "Use the dictionary of the training, and override only what leaves the parameters "
                "as they are.",
            ) from error
        raise UnsupportedError(
            f"a model in {path} that fairseq can build with the data in {data}",
            first_line(error),
            "Use the data of its training; a model of another plugin cannot be run here.",
        ) from error
    return models[0], task


def _remark(settings: Mapping[str, Any], words: Path) -> Optional[str]:
    recorded = data_folder_in(settings)
    trained = Path(recorded) / "dict.txt"
    if not recorded or not os.path.isfile(trained) or sha256(trained) == sha256(words):
        return None
    return (
        f"{words} differs from {trained}, with which the model was trained; if the order of the "
        "words differs, the figures mean nothing"
    )


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


def open_corpus(
    data: Union[str, Path], split: str, dictionary: Any, combine: bool = False
) -> IndexedCorpus:
    """Open a split that ``fairseq-preprocess --only-source`` wrote.

    ``combine`` appends the split's further files, ``train1``, ``train2``, ..., as training does.
    """
    if not split or Path(split).name != split:
        wanted = "the name of a split, such as valid"
        raise ConfigurationError(wanted, repr(split), "Correct --gen-subset.")
    prefix = str(Path(data) / split)
    check_indexed_files(prefix, len(dictionary))
    kind = indexed_dataset.infer_dataset_impl(prefix)
    if kind is None:
        there = sorted(path.stem for path in Path(data).glob("*.idx") if "." not in path.stem)
        raise MissingDataError(
            f"the split {split!r} of a monolingual corpus in {data}",
            f"the splits {listed(there, 9)}",
            "Name one of those; fairseq-preprocess --only-source makes the splits train, valid and "
            f"test (--validpref TEXT --srcdict {data}/dict.txt --destdir {data}).",
        )
    # fairseq's old format; its reader "cached" would keep in memory what has been read.
    kind = "lazy" if kind == "cached" else kind
    dataset = data_utils.load_indexed_dataset(prefix, dictionary, kind, combine=combine)
    corpus = IndexedCorpus(dataset)
    what = f"token in the split {split!r} in {data}"
    check_enough(len(corpus), 1, what, "Check the text that it was binarised from.")
    return corpus
