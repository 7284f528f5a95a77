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
from spectral_fairseq.lm.carry import Carry
from spectral_fairseq.lm.streams import ContiguousStreams
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
    progress: Callable[[int], None] = lambda _: None,
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

    A model of ``stateful_language_modeling`` reads the subset as one stream, in segments as long as
    those of its training, and carries its state from each to the next.

    Args:
        path: checkpoint.
        data: folder of binarised data.
        subset: which.
        tokens: rows at most.

    Raises:
        DataError: no such folder or subset.
        UnsupportedError: fairseq cannot build this model.
    """
    if not Path(data).is_dir():
        raise DataError(
            f"a folder of binarised data at {data}",
            "no such folder",
            "Give what fairseq-preprocess wrote to --destdir.",
        )
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
            f"the subset {subset!r} in {data}",
            "no such files",
            "Choose another with --gen-subset (train, valid, test).",
        ) from error
    dataset = task.dataset(subset)
    words, padding = len(task.target_dictionary), task.target_dictionary.pad()
    model = models[0].float().eval()
    if isinstance(dataset, Corpus):
        tokens = min(tokens, len(dataset))
        return Predictions(words, tokens, _blocks(_stream(model, task, dataset), tokens, words))
    sizes = getattr(dataset, "tgt_sizes", None)
    sizes = dataset.sizes if sizes is None else sizes
    tokens = min(tokens, int(np.sum(sizes)))
    batches = _batches(model, task, dataset, max(_BLOCK_NUMBERS // words, 1), padding)
    return Predictions(words, tokens, _blocks(batches, tokens, words))


def _blocks(rows: Iterator[Tensor], tokens: int, words: int) -> Iterator[Tensor]:
    """The first ``tokens`` rows, in blocks that fit in memory."""
    left = tokens
    for some in rows:
        yield from some[:left].split(max(_BLOCK_NUMBERS // words, 1))
        left -= some.size(0)
        if left <= 0:
            return


@torch.no_grad()
def _batches(model: Any, task: Any, dataset: Any, tokens: int, padding: int) -> Iterator[Tensor]:
    """Log-probabilities of batches that are run each by itself, shape (b, n) each."""
    batches = task.get_batch_iterator(
        dataset,
        max_tokens=max(int(np.max(dataset.sizes)), tokens),
        required_batch_size_multiple=1,
        num_workers=0,
        disable_iterator_cache=True,
    ).next_epoch_itr(shuffle=False)
    for sample in batches:
        if not sample:
            continue
        net_output = model(**sample["net_input"])
        log_probabilities = model.get_normalized_probs(net_output, log_probs=True, sample=sample)
        yield log_probabilities[sample["target"].ne(padding)].float()


@torch.no_grad()
def _stream(model: Any, task: Any, corpus: Corpus) -> Iterator[Tensor]:
    """Log-probabilities of a corpus that a model with a state reads as one stream."""
    dictionary, size = task.target_dictionary, task.args.tokens_per_sample
    stream = ContiguousStreams(corpus.tokens[1:], 1, dictionary.pad(), dictionary.eos())
    carry = Carry()
    for begin in range(0, stream.length, size):
        segment = stream.segment(begin, min(size, stream.length - begin), range(1))
        lengths = torch.tensor([segment.tokens.size(1)])
        net_output = model(segment.tokens, src_lengths=lengths, carry=carry)
        log_probabilities = model.get_normalized_probs(
            net_output, log_probs=True, sample={"target": segment.targets}
        )  # [1, b, n]
        yield log_probabilities[0].float()
