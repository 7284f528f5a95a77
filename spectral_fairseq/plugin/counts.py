"""Count the words of a dictionary in the training data, special symbols included.

``dict.txt`` holds no counts of fairseq's special symbols: every dictionary that is loaded says that
``</s>`` and ``<unk>`` occurred once. The usual recipe for sentencepiece gives all words the same
count, such as 100. All of them are therefore counted in the binarised training split.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
import os
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

import numpy as np
from fairseq import utils
from fairseq.data import Dictionary, indexed_dataset
from omegaconf import DictConfig

from spectral_fairseq.compat.patching import Patch, replaces, wrapping
from spectral_fairseq.functional.word_counts import (
    not_counted,
    smoothed_log_counts,
    were_counted,
)

logger = logging.getLogger(__name__)

# The number of tokens, or of sentences in fairseq's older formats, that are in memory at a time.
_BLOCK = 1 << 22
_SENTENCES = 10_000

_RESTORED = object()  # stands for the task of a model that a checkpoint overwrites
_task: contextvars.ContextVar[Any] = contextvars.ContextVar("task", default=None)


@contextlib.contextmanager
def building_for(task: Any, from_checkpoint: bool) -> Iterator[None]:
    """Within this context a model is built; see :func:`counts_for_new_table`.

    Args:
        task: the task in whose training data the words are counted.
        from_checkpoint: whether the new tables are overwritten next, so no count is needed.
    """
    restored = from_checkpoint or _task.get() is _RESTORED
    token = _task.set(_RESTORED if restored else task)
    try:
        yield
    finally:
        _task.reset(token)


def counts_for_new_table(dictionary: Dictionary) -> Optional[List[float]]:
    """The counts from which a table of the model that is being built starts.

    Returns:
        One count for each row; ``None`` for a model that a checkpoint overwrites, where neither
        the data nor the counts of the dictionary need to be there.
    """
    task = _task.get()
    return None if task is _RESTORED else training_counts(task, dictionary)


def training_counts(task: Any, dictionary: Dictionary) -> List[float]:
    """Counts of a dictionary's words and special symbols in the training data of a task.

    A dictionary of several languages is counted in all of them, or in one of them if its own counts
    are those of one: dictionaries that were made apart, or given twice, may be equal. Where the
    task has no binarised training data, the words have the dictionary's own counts, ``</s>`` and
    ``<unk>`` get the count whose smoothed logarithm is the mean of the words', and a warning says
    so.

    Returns:
        One count for each row.

    Raises:
        DataError: no training data, and a dictionary whose words were not counted: all have the
            same count.
    """
    data_counts = _counts_in_data(task, dictionary)
    if data_counts is not None:
        return data_counts
    counts, words = _own_counts(dictionary)
    if not were_counted(words):
        alike = f"{len(words)} words, all with the count {max(words, default=0):.0f}"
        raise not_counted(f"{alike if words else 'no count above 0'}, and no binarised data")
    mean = float(smoothed_log_counts(words).double().mean().expm1())
    logger.warning(
        "no binarised training data to count </s> and <unk> in; their count is taken to be "
        "the mean of the words', %.1f",
        mean,
    )
    counts[dictionary.eos()] = counts[dictionary.unk()] = mean
    return counts


def known_counts(dictionary: Dictionary) -> Optional[List[float]]:
    """The counts of the words while a model is built, for callers that can do without them.

    Returns:
        One count for each row, as in :func:`training_counts`; ``None`` where nothing was counted,
        and for a model that a checkpoint overwrites.
    """
    task = _task.get()
    if task is _RESTORED:
        return None
    data_counts = _counts_in_data(task, dictionary)
    if data_counts is not None:
        return data_counts
    counts, words = _own_counts(dictionary)
    return counts if were_counted(words) else None


def _own_counts(dictionary: Dictionary) -> Tuple[List[float], List[float]]:
    """The counts of all rows in ``dict.txt``, and those of its words."""
    counts = [float(count) for count in dictionary.count[: len(dictionary)]]
    # fairseq's ``madeupword`` fillers have the count 0.
    return counts, [count for count in counts[dictionary.nspecial :] if count > 0]


def _counts_in_data(task: Any, dictionary: Dictionary) -> Optional[List[float]]:
    """The counts in binarised training data, or ``None`` where the task has none."""
    kind = getattr(_configuration(task), "dataset_impl", None)
    languages = [
        _counted_in(files, None if kind is None else str(kind), dictionary)
        for files in _training_files(task, dictionary).values()
    ]
    if not languages:
        return None
    counts = np.sum(languages, axis=0)
    _, words = _own_counts(dictionary)
    if were_counted(words):

        def distance(candidate: np.ndarray) -> float:
            return abs(math.log(sum(words) / max(int(candidate[dictionary.nspecial :].sum()), 1)))

        # The first of equally near ones, so all languages where that cannot be told.
        counts = min([counts, *languages], key=distance)
    return [float(count) for count in counts]


def _configuration(task: Any) -> Any:
    return getattr(task, "args", None) or getattr(task, "cfg", None)


def _training_files(task: Any, dictionary: Dictionary) -> Dict[str, List[str]]:
    """Language -> the prefix of every file with training text in the words of ``dictionary``."""
    config = _configuration(task)
    data = getattr(config, "data", None)
    split = _training_split(config)
    suffixes = {"": ""}  # a suffix, and its language
    for pair in _language_pairs(task, config):
        suffixes.update(
            (f".{first}-{second}.{language}", language)
            for first, second in (tuple(pair), tuple(pair)[::-1])
            for language, words in pair.items()
            # fairseq loads a joined dictionary once for each language.
            if words == dictionary
        )
    prefixes: Dict[str, List[str]] = {}
    folders = utils.split_paths(str(data)) if data else []
    for folder in folders:
        for suffix, language in suffixes.items():
            for prefix in _with_numbered(os.path.join(folder, split), suffix):
                prefixes.setdefault(language, []).append(prefix)
    return prefixes or _in_folders_of_languages(folders, split, config)


def _in_folders_of_languages(folders: List[str], split: str, config: Any) -> Dict[str, List[str]]:
    """As :func:`_training_files`, of fairseq's multilingual tasks of one text."""
    prefixes: Dict[str, List[str]] = {}
    for folder in folders:
        for language in _languages_in(folder, config):
            for prefix in _with_numbered(os.path.join(folder, language, split), ""):
                prefixes.setdefault(language, []).append(prefix)
    return prefixes


def _languages_in(folder: str, config: Any) -> List[str]:
    """The languages that are named, or all folders."""
    named = getattr(config, "langs", None)
    if named and isinstance(named, str):
        return named.split(",")
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _training_split(config: Any) -> str:
    """The name of the split that is trained on, whether a task has a setting for it or not."""
    name = getattr(config, "train_subset", None)
    if name is None and isinstance(config, DictConfig):  # as of fairseq's language_modeling
        everything = config._get_parent()
        name = getattr(getattr(everything, "dataset", None), "train_subset", None)
    return str(name or "train")


def _language_pairs(task: Any, config: Any) -> Iterator[Dict[str, Dictionary]]:
    """The languages of each pair, with their dictionaries."""
    pair: List[Any] = [getattr(config, f"{side}_lang", None) for side in ("source", "target")]
    if all(pair):
        yield dict(zip(pair, (task.source_dictionary, task.target_dictionary)))
    pairs = getattr(config, "lang_pairs", None) or ()  # of tasks with several languages
    known = getattr(task, "dicts", {})
    for names in pairs.split(",") if isinstance(pairs, str) else pairs:
        pair = names.split("-")
        if len(pair) == 2 and all(language in known for language in pair):
            yield {language: known[language] for language in pair}


def _with_numbered(prefix: str, suffix: str) -> Iterator[str]:
    """The file, and then ``train1``, ``train2`` and so on, which fairseq joins to ``train``."""
    number: Optional[int] = None
    while indexed_dataset.dataset_exists(f"{prefix}{number or ''}{suffix}", "mmap"):
        yield f"{prefix}{number or ''}{suffix}"
        number = (number or 0) + 1


def _counted_in(files: Iterable[str], kind: Optional[str], dictionary: Dictionary) -> np.ndarray:
    """How often each symbol occurs in binarised files, int64."""
    size = len(dictionary)
    counts = np.zeros(size, dtype=np.int64)
    for prefix in files:
        for tokens in _blocks(prefix, kind, dictionary):
            known = tokens[tokens < size].astype(np.int64)
            counts += np.bincount(known, minlength=size)
            # Words that --output-dictionary-size cut off are read as <unk>.
            counts[dictionary.unk()] += len(tokens) - len(known)
    return counts


def _blocks(prefix: str, kind: Optional[str], dictionary: Dictionary) -> Iterator[np.ndarray]:
    kind = kind or indexed_dataset.infer_dataset_impl(prefix)
    # The reader "cached" would keep in memory what has been read.
    kind = "lazy" if kind == "cached" else kind
    dataset = indexed_dataset.make_dataset(
        prefix, kind, fix_lua_indexing=True, dictionary=dictionary
    )
    if isinstance(dataset, indexed_dataset.MMapIndexedDataset):
        path = indexed_dataset.data_file_path(prefix)
        if os.path.getsize(path) > 0:  # an empty file cannot be mapped
            stored = np.memmap(path, dtype=dataset._index.dtype, mode="r")
            for first in range(0, len(stored), _BLOCK):
                yield stored[first : first + _BLOCK]
        return
    for first in range(0, len(dataset), _SENTENCES):
        block = range(first, min(first + _SENTENCES, len(dataset)))
        yield np.concatenate([dataset[index].numpy() for index in block])


@wrapping
def _telling_task(
    cfg: Any, task: Any, *args: Any, original: Callable[..., Any], **kwargs: Any
) -> Any:
    from_checkpoint = bool(args[0] if args else kwargs.get("from_checkpoint", False))
    with building_for(task, from_checkpoint):
        return original(cfg, task, *args, **kwargs)


TRAINING_COUNTS = Patch(
    name="training counts",
    reason="Weight-norm tables count </s> and <unk> in the training data of the task, which "
    "fairseq does not pass to what builds them.",
    install=replaces({"fairseq.models:build_model": _telling_task}),
)
