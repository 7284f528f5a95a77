"""Exact perplexity of a corpus of any length: every token once, in order, in bounded memory.

A corpus is one long sequence x_1 .. x_n. What precedes x_1 is the end of a sentence, which is so
never predicted itself. A model reads the corpus in segments; of each only sums are kept.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Optional, Sequence

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError, DataError
from spectral_fairseq.functional.cache import check_interpolation, interpolate
from spectral_fairseq.lm.cache import ContinuousCache
from spectral_fairseq.lm.carry import Carry
from spectral_fairseq.lm.streams import ContiguousStreams, Corpus, Segment

Progress = Callable[[int], None]
"""Called with the number of tokens just done."""


def _ignore(tokens: int) -> None:
    pass


@dataclass
class Predictions:
    """What a model says about a segment.

    Attributes:
        log_probabilities: of the targets, in nats, shape (B, T).
        targets: shape (B, T).
        counted: which targets are no padding, shape (B, T).
        features: what the output layer took, shape (B, T, d_h); None where not to be had.
    """

    log_probabilities: Tensor
    targets: Tensor
    counted: Tensor
    features: Optional[Tensor]

    def mean_nll(self) -> Tensor:
        """Mean negative log-likelihood of the tokens that count, with its gradient."""
        return -self.log_probabilities[self.counted].mean()


class Reader:
    """How a model reads a corpus; the two kinds are :class:`StreamReader` and the plugin's blocks.

    Args:
        model: in evaluation mode; where its first parameter lies, tokens are sent.
        padding: index that is no word.
        start: index of the token that precedes the corpus.
    """

    def __init__(self, model: Any, padding: int, start: int) -> None:
        self.model = model
        self.padding = padding
        self.start = start

    def segments(self, corpus: Corpus) -> Iterator[Segment]:
        """The corpus in pieces, in the order of reading.

        Raises:
            DataError: it cannot be cut so.
        """
        raise NotImplementedError

    def predict(self, segment: Segment, carry: Carry) -> Predictions:
        """Run the model on one piece.

        Args:
            segment: one of :meth:`segments`.
            carry: one for each pass through a corpus, new at its beginning.
        """
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def inputs(self, corpus: Corpus, first: int, end: int) -> Tensor:
        """What the model reads to predict the tokens ``first`` .. ``end`` - 1."""
        if first > 0:
            return corpus[first - 1 : end - 1].long()
        begin = torch.full((1,), self.start, dtype=torch.long)
        return torch.cat([begin, corpus[0 : end - 1].long()])


class StreamReader(Reader):
    """A model with a state: ``model(tokens, src_lengths=lengths, carry=carry)``.

    Args:
        model: gives scores and a dictionary with ``features``, and has ``get_normalized_probs``.
        padding: index that is no word.
        start: index of the token that precedes the corpus.
        streams: B, read side by side.
        segment: T, tokens of each stream at a time.
    """

    def __init__(self, model: Any, padding: int, start: int, streams: int, segment: int) -> None:
        super().__init__(model, padding, start)
        self.streams = streams
        self.segment = segment

    def segments(self, corpus: Corpus) -> Iterator[Segment]:
        """The segments of all streams side by side; see :mod:`spectral_fairseq.lm.streams`."""
        streams = ContiguousStreams(corpus, self.streams, self.padding, self.start)
        for begin in range(0, streams.length, self.segment):
            size = min(self.segment, streams.length - begin)
            yield streams.segment(begin, size, range(self.streams))

    def predict(self, segment: Segment, carry: Carry) -> Predictions:
        """As in the base."""
        tokens, targets = segment.tokens.to(self.device), segment.targets.to(self.device)
        counted = targets.ne(self.padding)
        output = self.model(tokens, src_lengths=counted.sum(1), carry=carry)
        log_probabilities = self.model.get_normalized_probs(
            output, log_probs=True, sample={"target": targets}
        )  # [B, T, N]
        return Predictions(
            log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1),
            targets,
            counted,
            output[1]["features"],
        )


@dataclass
class CacheGrid:
    """A cache and the values with which it is mixed in; one value of each is no grid.

    Attributes:
        window: W.
        thetas: K values >= 0.
        weights: lambda, L values in [0, 1).
    """

    window: int
    thetas: Sequence[float]
    weights: Sequence[float]

    def check(self) -> None:
        """Refuse impossible values.

        Raises:
            ConfigurationError: an empty axis, or a value outside its range.
        """
        ContinuousCache(self.window)
        for name, values in (("theta", self.thetas), ("lambda", self.weights)):
            if len(values) < 1:
                raise ConfigurationError(f"a value of the cache's {name}", "none", "Give one.")
        for theta in self.thetas:
            if not (math.isfinite(theta) and theta >= 0.0):
                raise ConfigurationError(
                    "the cache's theta to be 0 or more", repr(theta), "Give such a value."
                )
        for weight in self.weights:
            check_interpolation(weight)


@dataclass
class Evaluation:
    """Sums over a corpus, in nats.

    Attributes:
        tokens: predicted, each once.
        nll: negative log-likelihood by the model.
        cached: the same with the cache, one list over lambda for each theta; empty without one.
    """

    tokens: int = 0
    nll: float = 0.0
    cached: Sequence[Sequence[float]] = field(default_factory=list)


def perplexity(nll: float, tokens: int) -> float:
    """exp(nll / tokens), infinite where that is too large for a number or no number."""
    mean = nll / tokens
    return math.exp(mean) if mean < 700.0 else math.inf


@contextlib.contextmanager
def differentiable() -> Iterator[None]:
    """Gradients of a model in evaluation mode: cuDNN's recurrent layers refuse to give them."""
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        yield


def evaluate(
    reader: Reader,
    corpus: Corpus,
    *,
    cache: Optional[CacheGrid] = None,
    update: Optional[Callable[[Tensor], None]] = None,
    progress: Progress = _ignore,
) -> Evaluation:
    """Read a corpus once.

    Memory does not grow with the corpus: of each segment only sums are kept, and of the states
    those in the window of the cache.

    Args:
        reader: the model and how it reads.
        corpus: at least one token.
        cache: mix a continuous cache in, for all its values in the same pass.
        update: called with the mean loss of each segment after it has been scored, to adapt the
            model; the loss is the model's own, without the cache.
        progress: called after each segment.

    Raises:
        DataError: a corpus without a token, or too short for the streams.
        ConfigurationError: impossible values of the cache, or a model that shows no states.
    """
    if len(corpus) < 1:
        raise DataError("a corpus with at least one token", "none", "Check the data.")
    found = Evaluation()
    memory = None
    sums = torch.zeros(0, 0, dtype=torch.float64)
    if cache is not None:
        cache.check()
        memory = ContinuousCache(cache.window)
        sums = torch.zeros(len(cache.thetas), len(cache.weights), dtype=torch.float64)
    carry = Carry()
    for segment in reader.segments(corpus):
        with differentiable() if update is not None else torch.no_grad():
            predicted = reader.predict(segment, carry)
        count = int(predicted.counted.sum())
        log_model = predicted.log_probabilities.detach()
        found.tokens += count
        found.nll -= float(log_model[predicted.counted].double().sum())
        if memory is not None and cache is not None:
            with torch.no_grad():
                sums -= _mixed_sums(memory, cache, log_model, predicted)
        if update is not None:
            with differentiable():
                update(predicted.mean_nll())
        progress(count)
    found.cached = sums.tolist()
    return found


def _mixed_sums(
    memory: ContinuousCache, cache: CacheGrid, log_model: Tensor, predicted: Predictions
) -> Tensor:
    """Summed log-probabilities with the cache, shape (thetas, lambdas)."""
    if predicted.features is None:
        raise ConfigurationError(
            "a model that shows the states before its output layer",
            "one that does not",
            "Evaluate it without the cache.",
        )
    found, seen = memory(predicted.features, predicted.targets, cache.thetas)
    counted = predicted.counted
    columns = [
        interpolate(log_model, found, seen, weight)[:, counted].double().sum(-1)
        for weight in cache.weights
    ]
    return torch.stack(columns, 1).cpu()
