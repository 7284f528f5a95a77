"""Measures of a model's predictions on data: rank of log P, its spectrum, pairwise KL.

The measures are defined in :mod:`functional.measures.rank` and
:mod:`functional.measures.divergence`; here fairseq builds and runs the model, and
its log-probabilities are passed on block by block.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Tuple, Union

import numpy as np
import torch
from fairseq import checkpoint_utils
from torch import Tensor

import spectral_fairseq.plugin  # noqa: F401  registers the architectures that a checkpoint names
from spectral_fairseq.errors import (
    ConfigurationError,
    DataError,
    SpectralFairseqError,
    UnsupportedError,
)
from spectral_fairseq.functional.linalg.blockwise_spectrum import BlockwiseSpectrum
from spectral_fairseq.functional.measures.divergence import ExpectedPairwiseKL
from spectral_fairseq.functional.measures.rank import (
    cumulative_share,
    empirical_rank,
    roundoff_threshold,
)
from spectral_fairseq.plugin.tasks.corpus import Corpus

MEMORY_LIMIT = 8 * 2**30
# 64 MiB of float64 at a time.
_BLOCK_NUMBERS = 8 * 2**20
# x of the cumulative share. The paper's figure 1 begins at 1e-10, but below the eps of float32, in
# which log-probabilities are computed, it shows roundoff.
POINTS = [10 ** (-7 + step / 10) for step in range(71)]


@dataclass
class Predictions:
    """The log-probabilities of a model on a subset of its data.

    Attributes:
        words: n, the columns: all rows of the target dictionary.
        tokens: an upper bound of the number of rows to come.
        blocks: shape (b, n) each, float32, one row a target token that is not padding.
    """

    words: int
    tokens: int
    blocks: Iterator[Tensor]


def spectrum_bytes(tokens: int, words: int) -> int:
    """Memory that the spectrum of a tokens x words matrix takes: see measures/rank.py."""
    if tokens >= words:
        return 3 * 8 * words**2  # Gram matrix, the solver's copy and its workspace
    return 4 * tokens * words + 3 * 8 * tokens**2


def measure_outputs(
    path: Union[str, Path],
    data: Union[str, Path],
    subset: str = "valid",
    tokens: int = 4096,
    progress: Callable[[int], None] = lambda rows: None,
) -> Tuple[Dict[str, float], Dict[str, Any]]:
    """Rank, spectrum and divergence of a model's predictions.

    Args:
        path: checkpoint.
        data: folder of binarised data.
        subset: which.
        tokens: contexts at most, the first ones of the subset.
        progress: called with the number of rows of each block when it is done.

    Returns:
        Entries for ``measures`` and the entry ``outputs`` of the document.

    Raises:
        ConfigurationError: more than the memory limit.
        DataError: no such subset, or too few tokens.
        UnsupportedError: a model that gives no log-probabilities.
    """
    predictions = predict(path, data, subset, tokens)
    check_memory(predictions.tokens, predictions.words)
    spectrum = BlockwiseSpectrum(predictions.tokens, predictions.words)
    divergence = ExpectedPairwiseKL(predictions.words)
    for block in predictions.blocks:
        spectrum.add(block)
        divergence.add(block)
        progress(block.size(0))
    sigma = spectrum.singular_values()
    size = (spectrum.rows, spectrum.columns)
    measures = {
        "log_probability_rank": float(empirical_rank(sigma, *size)),
        "expected_pairwise_kl": divergence.value(),
    }
    details = {
        "data": str(data),
        "subset": subset,
        "tokens": spectrum.rows,
        "words": spectrum.columns,
        "threshold": roundoff_threshold(1.0, *size),
        "points": POINTS,
        "cumulative_share": cumulative_share(sigma, POINTS),
    }
    return measures, details


def check_memory(tokens: int, words: int) -> None:
    """Refuse a matrix whose spectrum would not fit.

    Raises:
        ConfigurationError: with the number of tokens that would.
    """
    if tokens < 2:
        raise ConfigurationError("--tokens to be at least 2", str(tokens), "Give more.")
    needed = spectrum_bytes(tokens, words)
    if needed <= MEMORY_LIMIT:
        return
    # The positive root of 24 t^2 + 4 n t = limit.
    fitting = int((-words + (words**2 + 6 * MEMORY_LIMIT) ** 0.5) / 12)
    raise ConfigurationError(
        f"a spectrum that fits in {MEMORY_LIMIT / 2**30:.0f} GiB",
        f"{tokens:,} tokens x {words:,} words, which take {needed / 2**30:.1f} GiB",
        f"Give --tokens {fitting // 100 * 100}.",
    )


def predict(
    path: Union[str, Path], data: Union[str, Path], subset: str, tokens: int
) -> Predictions:
    """Run a checkpoint on the first tokens of a subset.

    Args:
        path: checkpoint.
        data: folder of binarised data.
        subset: which.
        tokens: rows at most.

    Raises:
        DataError: no such folder or subset.
        UnsupportedError: fairseq cannot build this model, or its batches need one another.
    """
    if not Path(data).is_dir():
        raise DataError(
            f"a folder of binarised data at {data}", "no such folder",
            "Give what fairseq-preprocess wrote to --destdir.",
        )  # fmt: skip
    try:
        models, _, task = checkpoint_utils.load_model_ensemble_and_task(
            [str(path)], arg_overrides={"data": str(data)}
        )
    except SpectralFairseqError:
        raise
    except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"a model in {path} that fairseq can build with the data in {data}",
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            "Use the data of its training; a model of another plugin cannot be run here.",
        ) from error
    try:
        task.load_dataset(subset)
    except FileNotFoundError as error:
        raise DataError(
            f"the subset {subset!r} in {data}", "no such files",
            "Choose another with --gen-subset (train, valid, test).",
        ) from error  # fmt: skip
    dataset = task.dataset(subset)
    if isinstance(dataset, Corpus):
        raise UnsupportedError(
            f"a model in {path} whose batches can be run each by itself",
            "one of --task stateful_language_modeling, whose state goes from segment to segment",
            "Leave out --data; spectral-fairseq evaluate-lm gives its perplexity.",
        )
    sizes = getattr(dataset, "tgt_sizes", None)
    sizes = dataset.sizes if sizes is None else sizes
    available = int(np.sum(sizes))
    words = len(task.target_dictionary)
    return Predictions(
        words, min(tokens, available), _blocks(models[0], task, dataset, min(tokens, available))
    )


@torch.no_grad()
def _blocks(model: Any, task: Any, dataset: Any, tokens: int) -> Iterator[Tensor]:
    model = model.float().eval()
    words, padding = len(task.target_dictionary), task.target_dictionary.pad()
    longest = int(np.max(dataset.sizes))
    batches = task.get_batch_iterator(
        dataset,
        max_tokens=max(longest, _BLOCK_NUMBERS // words),
        required_batch_size_multiple=1,
        num_workers=0,
        disable_iterator_cache=True,
    ).next_epoch_itr(shuffle=False)
    left = tokens
    for sample in batches:
        if not sample:
            continue
        net_output = model(**sample["net_input"])
        log_probabilities = model.get_normalized_probs(net_output, log_probs=True, sample=sample)
        counted = sample["target"].ne(padding)
        rows = log_probabilities[counted].float()[:left]  # [b, words]
        yield from rows.split(max(_BLOCK_NUMBERS // words, 1))
        left -= rows.size(0)
        if left <= 0:
            return
