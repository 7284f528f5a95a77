"""What a model predicts on data: measures of it and of the hidden states.

The measures are defined in :mod:`functional`: rank and spectrum of log P, pairwise KL, and the
geometry of the hidden states. Here fairseq builds and runs the model, and what it computes is
passed on block by block.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple, Union

import numpy as np
import torch
from fairseq.data import data_utils
from torch import Tensor

from spectral_fairseq.commands.models import load_model_and_task
from spectral_fairseq.errors import ConfigurationError, DataError, UnsupportedError, check_range
from spectral_fairseq.files import check_directory
from spectral_fairseq.functional.blockwise_spectrum import BlockwiseSpectrum
from spectral_fairseq.functional.empirical_rank import (
    cumulative_share,
    empirical_rank,
    roundoff_threshold,
)
from spectral_fairseq.functional.hidden_states import SequenceCosine, StateStatistics
from spectral_fairseq.functional.pairwise_kl import ExpectedPairwiseKL
from spectral_fairseq.lm.carry import Carry
from spectral_fairseq.lm.evaluation import StreamReader
from spectral_fairseq.plugin.corpus import Corpus
from spectral_fairseq.plugin.find import decoder_of, is_autoregressive, models_in

MEMORY_LIMIT = 8 * 2**30
# 64 MiB of float64 at a time.
_BLOCK_NUMBERS = 8 * 2**20
# x of the cumulative share. The paper's figure 1 begins at 1e-10, but below the eps of float32, in
# which log-probabilities are computed, it shows roundoff.
POINTS = [10 ** (-7 + step / 10) for step in range(71)]


class Rows(NamedTuple):
    """What a model computes for some target tokens that are not padding.

    Attributes:
        log_probabilities: shape (b, n), float32.
        targets: shape (b,).
        states: the decoder's hidden states, shape (b, d_l) each: the embeddings and the output of
            each layer, where the model tells them, and last the input of the output layer.
        sequences: the number of the sequence that each token belongs to, shape (b,).
    """

    log_probabilities: Tensor
    targets: Tensor
    states: List[Tensor]
    sequences: Tensor

    def part(self, start: int, end: int) -> Rows:
        """Rows ``start`` to ``end``."""
        states = [layer[start:end] for layer in self.states]
        return Rows(
            self.log_probabilities[start:end],
            self.targets[start:end],
            states,
            self.sequences[start:end],
        )


@dataclass
class Predictions:
    """What a model computes on a subset of its data.

    Attributes:
        words: n, the columns: all rows of the target dictionary.
        tokens: an upper bound of the number of rows to come.
        blocks: of these rows.
    """

    words: int
    tokens: int
    blocks: Iterator[Rows]


def spectrum_bytes(tokens: int, words: int) -> int:
    """Memory that the spectrum of a tokens x words matrix takes: see blockwise_spectrum.py."""
    if tokens >= words:
        return 3 * 8 * words**2  # Gram matrix, the solver's copy and its workspace
    return 4 * tokens * words + 3 * 8 * tokens**2


def measure_outputs(
    path: Union[str, Path],
    data: Union[str, Path],
    subset: str = "valid",
    tokens: int = 4096,
    progress: Callable[[int], None] = lambda _: None,
) -> Tuple[Dict[str, Optional[float]], Dict[str, Any]]:
    """Measures of a model's predictions and hidden states.

    Returns:
        Entries for ``measures``, None where one does not apply, and the entry ``outputs`` of the
        document.
    """
    predictions = predict(path, data, subset, tokens)
    check_memory(predictions.tokens, predictions.words)
    spectrum = BlockwiseSpectrum(predictions.tokens, predictions.words)
    divergence = ExpectedPairwiseKL(predictions.words)
    hidden = StateMeasures()
    for block in predictions.blocks:
        spectrum.add(block.log_probabilities)
        divergence.add(block.log_probabilities)
        hidden.add(block.states, block.sequences)
        progress(len(block.targets))
    sigma = spectrum.singular_values()
    size = (spectrum.rows, spectrum.columns)
    measures: Dict[str, Optional[float]] = {
        "log_probability_rank": float(empirical_rank(sigma, *size)),
        "expected_pairwise_kl": divergence.value(),
    }
    measures.update(hidden.measures())
    details = {
        "data": str(data),
        "subset": subset,
        "tokens": spectrum.rows,
        "words": spectrum.columns,
        "threshold": roundoff_threshold(1.0, *size),
        "points": POINTS,
        "cumulative_share": cumulative_share(sigma, POINTS),
        "layers": hidden.layers(),
    }
    return measures, details


class StateMeasures:
    """Accumulates the measures of all layers."""

    def __init__(self) -> None:
        self._layers: List[StateStatistics] = []
        self._within: List[SequenceCosine] = []

    def add(self, states: List[Tensor], sequences: Tensor) -> None:
        """Add states, one tensor of shape (b, d_l) for each layer; none where they are unknown.

        ``sequences`` has the number of the sequence of each state, shape (b,).
        """
        if not states:
            return
        if not self._layers:
            self._layers = [StateStatistics(layer.size(1)) for layer in states]
            self._within = [SequenceCosine() for _ in states]
        for statistics, within, layer in zip(self._layers, self._within, states):
            statistics.add(layer)
            within.add(layer, sequences)

    def layers(self) -> List[Dict[str, Any]]:
        """Entries of ``layers`` in the document."""
        return [
            {
                "mean_cosine": layer.mean_cosine(),
                "sequence_cosine": within.value(),
                "isoscore": layer.isoscore(),
            }
            for layer, within in zip(self._layers, self._within)
        ]

    def measures(self) -> Dict[str, Optional[float]]:
        """Measures of the last layer; empty where no states are known."""
        return {"hidden_mean_cosine": self._layers[-1].mean_cosine()} if self._layers else {}


def check_memory(tokens: int, words: int) -> None:
    """Refuse a matrix whose spectrum would not fit."""
    check_range("--tokens", tokens, at_least=2, whole=True)
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

    Raises:
        DataError: no such data, or data that do not fit the model.
        UnsupportedError: several models in one, a non-autoregressive one, or one that fairseq
            cannot build with these data.
    """
    remedy = "Give what fairseq-preprocess wrote to --destdir."
    check_directory(data, "a folder of binarised data", remedy, DataError)
    model, task = load_model_and_task(path, data, {})
    if models_in(model) != [model] or not is_autoregressive(model):
        raise UnsupportedError(
            f"one model that predicts the next word from the words before it in {path}, for --data",
            f"a {type(model).__name__}",
            "Leave out --data, which measures what such a model predicts.",
        )
    try:
        task.load_dataset(subset)
    except FileNotFoundError as error:
        remedy = "Choose another with --gen-subset (train, valid, test)."
        raise DataError(f"the subset {subset!r} in {data}", "no such files", remedy) from error
    dataset = task.dataset(subset)
    words, padding = len(task.target_dictionary), task.target_dictionary.pad()
    model = model.float().eval()
    if isinstance(dataset, Corpus):
        tokens = min(tokens, len(dataset))
        rows = _stream(model, task, dataset)
    else:
        sizes = getattr(dataset, "tgt_sizes", None)
        sizes = dataset.sizes if sizes is None else sizes
        tokens = min(tokens, int(np.sum(sizes)))
        rows = _batches(model, dataset, max(_BLOCK_NUMBERS // words, 1), padding)
    return Predictions(words, tokens, _blocks(rows, tokens, words))


def _blocks(rows: Iterator[Rows], tokens: int, words: int) -> Iterator[Rows]:
    """The first ``tokens`` rows, in blocks that fit in memory."""
    left, size = tokens, max(_BLOCK_NUMBERS // words, 1)
    for some in rows:
        count = min(len(some.targets), left)
        for start in range(0, count, size):
            yield some.part(start, min(start + size, count))
        left -= count
        if left <= 0:
            return


class _OutputLayerInput:
    """Keeps what a model's decoder, which it changes, passes to its output layer.

    It is ``features``, or None if it cannot be seen.
    """

    def __init__(self, model: Any) -> None:
        self.features: Optional[Tensor] = None
        decoder: Any = decoder_of(model)
        self._inner: Any = getattr(decoder, "output_layer", None)
        if self._inner is not None:
            decoder.output_layer = self

    def __call__(self, features: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The decoder's own output layer."""
        self.features = features
        return self._inner(features, *args, **kwargs)

    def states(self, extra: Any, kept: Tensor) -> List[Tensor]:
        """The states of the tokens that ``kept``, shape (B, T), marks, as in :class:`Rows`."""
        if self.features is None:
            return []
        inner = (extra.get("inner_states") or []) if isinstance(extra, dict) else []
        states = [layer.transpose(0, 1)[kept].float() for layer in inner]  # from (T, B, d)
        last = self.features[kept].float()
        if states and torch.equal(states[-1], last):  # no normalisation or projection follows
            states.pop()
        return [*states, last]


@torch.no_grad()
def _batches(model: Any, dataset: Any, tokens: int, padding: int) -> Iterator[Rows]:
    """Batches that are run each by itself, in the order of the corpus.

    fairseq's own iterator would begin with the shortest sentences.
    """
    seen, before = _OutputLayerInput(model), 0
    batches = data_utils.batch_by_size(
        np.arange(len(dataset)),
        dataset.num_tokens,
        max_tokens=max(int(np.max(dataset.sizes)), tokens),
    )
    for batch in batches:
        sample = dataset.collater([dataset[int(index)] for index in batch])
        net_output = model(**sample["net_input"])
        # Given targets, fairseq's adaptive softmax fills no other clusters than theirs.
        log_probabilities = model.get_normalized_probs(net_output, log_probs=True, sample=None)
        kept = sample["target"].ne(padding)  # [B, T]
        # Translation sorts a batch by length: the places of its tokens in the order of the corpus.
        order = sample["id"].argsort()
        place = (kept.flatten().cumsum(0) - 1).view_as(kept)[order][kept[order]]
        yield Rows(
            log_probabilities[kept][place].float(),
            sample["target"][kept][place],
            [states[place] for states in seen.states(net_output[1], kept)],
            before + kept[order].nonzero()[:, 0],
        )
        before += len(kept)


@torch.no_grad()
def _stream(model: Any, task: Any, corpus: Corpus) -> Iterator[Rows]:
    """A corpus that a model with a state reads as one stream."""
    seen = _OutputLayerInput(model)
    dictionary, size = task.target_dictionary, task.args.tokens_per_sample
    reader = StreamReader(model, dictionary.pad(), dictionary.eos(), 1, size)
    carry = Carry()
    for number, segment in enumerate(reader.segments(corpus.tokens[1:])):
        lengths = torch.tensor([segment.tokens.size(1)])
        net_output = model(segment.tokens, src_lengths=lengths, carry=carry)
        log_probabilities = model.get_normalized_probs(
            net_output, log_probs=True, sample={"target": segment.targets}
        )  # [1, b, n]
        kept = torch.ones_like(segment.targets, dtype=torch.bool)
        states = seen.states(net_output[1], kept)
        numbers = torch.full_like(segment.targets[0], number)
        yield Rows(log_probabilities[0].float(), segment.targets[0], states, numbers)
