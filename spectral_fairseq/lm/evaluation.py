"""Exact perplexity of a corpus of any length: every token once, in order, in bounded memory.

A model reads the corpus in segments, and only sums are kept of each segment;
``streams.py``, Note [How a corpus is cut] says where.

In order: ``StreamReader.segments``, ``StreamReader.predict``, ``evaluate``.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Optional, Sequence

import torch
from torch import Tensor

from spectral_fairseq.functional.progress import ProgressCallback, ignore_progress
from spectral_fairseq.lm.carry import Carry
from spectral_fairseq.lm.continuous_cache import CacheGrid, ContinuousCache, interpolate
from spectral_fairseq.lm.streams import ContiguousStreams, Corpus, Segment


@dataclass
class ScoredSegment:
    """A model's predictions for a segment.

    Attributes:
        log_probabilities: of the targets, in nats, shape (B, T).
        targets: shape (B, T).
        counted: which targets are not padding, shape (B, T), bool.
        features: inputs of the output layer, shape (B, T, d_h).
    """

    log_probabilities: Tensor
    targets: Tensor
    counted: Tensor
    features: Tensor

    def mean_nll(self) -> Tensor:
        """Return the mean negative log-likelihood without padding, with its gradient."""
        return -self.log_probabilities[self.counted].mean()


class StreamReader:
    """Reads a corpus with a stateful model, ``model(tokens, src_lengths=lengths, carry=carry)``.

    Args:
        model: in evaluation mode; returns scores and a dictionary with ``features``, and has
            ``get_normalized_probs``. Tokens are moved to the device of its first parameter.
        padding: index of the padding symbol.
        start: index of the token that precedes the corpus.
        streams: B, the number of streams that are read side by side.
        segment: T, the number of tokens of each stream in a segment.
    """

    def __init__(self, model: Any, padding: int, start: int, streams: int, segment: int) -> None:
        self.model = model
        self.padding = padding
        self.start = start
        self.streams = streams
        self.segment = segment

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    def segments(self, corpus: Corpus) -> Iterator[Segment]:
        """Yield the segments of all streams side by side; see :mod:`lm.streams`."""
        streams = ContiguousStreams(corpus, self.streams, self.padding, self.start)
        for begin in range(0, streams.length, self.segment):
            size = min(self.segment, streams.length - begin)
            yield streams.segment(begin, size, range(self.streams))

    def predict(self, segment: Segment, carry: Carry) -> ScoredSegment:
        """Run the model on a segment, from the state in ``carry``, and leave the new one there."""
        tokens, targets = segment.tokens.to(self.device), segment.targets.to(self.device)
        counted = targets.ne(self.padding)
        output = self.model(tokens, src_lengths=counted.sum(1), carry=carry)
        log_probabilities = self.model.get_normalized_probs(
            output, log_probs=True, sample={"target": targets}
        )  # [B, T, N]
        return ScoredSegment(
            log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1),
            targets,
            counted,
            output[1]["features"],
        )


@dataclass
class Evaluation:
    """Sums over a corpus, in nats.

    Attributes:
        tokens: number of predicted tokens.
        nll: negative log-likelihood of the model.
        cached: the same with the cache, one list over lambda for each theta; empty without a cache.
    """

    tokens: int = 0
    nll: float = 0.0
    cached: Sequence[Sequence[float]] = field(default_factory=list)


def perplexity(nll: float, tokens: int) -> float:
    """Return exp(nll / tokens), or infinity where that overflows or is not a number."""
    mean = nll / tokens
    return math.exp(mean) if mean < 700.0 else math.inf


@contextlib.contextmanager
def differentiable() -> Iterator[None]:
    """Enable gradients in evaluation mode, in which cuDNN's recurrent layers refuse them."""
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        yield


def evaluate(
    reader: StreamReader,
    corpus: Corpus,
    *,
    cache: Optional[CacheGrid] = None,
    update: Optional[Callable[[Tensor], None]] = None,
    progress: ProgressCallback = ignore_progress,
) -> Evaluation:
    """Evaluate a model on a corpus in one pass.

    Memory does not grow with the corpus: only sums are kept of each segment, and only the hidden
    states in the window of the cache.

    Args:
        reader: the model and the way in which it reads.
        corpus: at least one token for each stream.
        cache: a continuous cache to mix in, for all its values in the same pass.
        update: called with the mean loss of each segment after it has been scored, to adapt the
            model; the loss is that of the model without the cache.
        progress: called after each segment with its number of tokens.

    Raises:
        DataError: the corpus is too short for the streams.
        ConfigurationError: impossible values of the cache.
    """
    evaluation = Evaluation()
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
        evaluation.tokens += count
        evaluation.nll -= float(log_model[predicted.counted].double().sum())
        if memory is not None and cache is not None:
            with torch.no_grad():
                sums -= _mixed_sums(memory, cache, log_model, predicted)
        if update is not None:
            with differentiable():
                update(predicted.mean_nll())
        progress(count)
    evaluation.cached = sums.tolist()
    return evaluation


def _mixed_sums(
    memory: ContinuousCache, cache: CacheGrid, log_model: Tensor, predicted: ScoredSegment
) -> Tensor:
    """Return the summed log-probabilities with the cache, shape (thetas, lambdas)."""
    probabilities, seen = memory(predicted.features, predicted.targets, cache.thetas)
    counted = predicted.counted
    columns = [
        interpolate(log_model, probabilities, seen, weight)[:, counted].double().sum(-1)
        for weight in cache.weights
    ]
    return torch.stack(columns, 1).cpu()
