"""Exact perplexity of a corpus of any length: every token once, in order, in bounded memory.

A corpus is one long sequence x_1 .. x_n. The token before x_1 is an end of sentence, which itself
is not predicted. A model reads the corpus in segments, and only sums are kept of each segment;
Note [How a corpus is cut] says where.

Flags: ``--tokens-per-sample`` 70, ``--variable-bptt`` off.
In order: ``plugin/streams.py``, ``ContiguousStreams``, ``Segment``.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Optional, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError, check_enough, check_range
from spectral_fairseq.functional.adaptation import cache_probability, interpolate
from spectral_fairseq.functional.progress import ProgressCallback, ignore_progress
from spectral_fairseq.lm.awd_lstm import Carry

# A corpus as contiguous streams that are read side by side, segment by segment.
#
# Note [How a corpus is cut]
# --------------------------
# A model with a state reads B contiguous streams side by side, segment by segment, and carries its
# state from each segment to the next. Stream b holds the tokens b n / B .. (b + 1) n / B, rounded
# down, so some streams are one token longer than others, whose ends are padded. The first input of
# a stream is the token that precedes it in the corpus, but its first state is empty: this is the
# cost of B > 1. Training, validation and ``evaluate-lm`` all use this module, so their figures are
# equal if B and the segments are. A last segment of fewer than five tokens is joined to the one
# before in training and validation only, which changes what a Transformer-XL remembers of it.

Corpus = Any
"""``len(corpus)`` tokens, of which ``corpus[a:b]`` is a tensor of integers; it can be a tensor."""


@dataclass
class Segment:
    """A piece of a corpus in the form in which a model reads it.

    Attributes:
        tokens: inputs, shape (R, S).
        targets: the token after each, shape (R, S); padding where nothing is predicted.
    """

    tokens: Tensor
    targets: Tensor


class ContiguousStreams:
    """The streams of a corpus; see Note [How a corpus is cut].

    Args:
        corpus: n tokens.
        streams: B.
        padding: index of the padding symbol.
        start: index of the token that precedes the corpus.

    Attributes:
        length: number of tokens of the longest stream.

    Raises:
        DataError: the corpus has fewer tokens than streams.
    """

    def __init__(self, corpus: Corpus, streams: int, padding: int, start: int) -> None:
        total = len(corpus)
        check_enough(total, streams, "tokens, one for each stream", "Use fewer streams.")
        self.corpus, self.padding, self.start = corpus, padding, start
        # Where each stream starts, and where the last one ends.
        self.bounds = [stream * total // streams for stream in range(streams + 1)]
        self.length = -(-total // streams)

    def segment(self, begin: int, size: int, rows: range) -> Segment:
        """Return the tokens ``begin`` .. ``begin + size`` of some streams, shape (R, size).

        Args:
            begin: position in each stream.
            size: number of tokens; streams that end before are padded.
            rows: the streams, R of them.
        """
        starts = torch.tensor([self.bounds[row] + begin for row in rows])
        ends = torch.tensor([self.bounds[row + 1] for row in rows])
        both = torch.stack([self._around(first, size) for first in starts.tolist()]).long()
        outside = starts.unsqueeze(1) + torch.arange(size) >= ends.unsqueeze(1)  # [R, size]
        return Segment(
            both[:, :-1].masked_fill(outside, self.padding),
            both[:, 1:].masked_fill(outside, self.padding),
        )

    def _around(self, first: int, size: int) -> Tensor:
        """Return ``size`` tokens from ``first`` on and the one before them, shape (size + 1,)."""
        piece = self.corpus[max(first - 1, 0) : first + size]
        before = [self.start] if first == 0 else []
        after = [self.padding] * (size + 1 - len(before) - len(piece))
        return torch.cat([piece.new_tensor(before), piece, piece.new_tensor(after)])


# The continuous cache for streams that are read segment by segment; its equations are in
# :mod:`spectral_fairseq.functional.adaptation`.

# Number of scores held at a time: 16 MiB of float32.
BLOCK_SCORES = 4 * 2**20
# A narrow window is still evaluated for this many tokens at once, although most scores are unused.
MIN_BLOCK_TOKENS = 32


class ContinuousCache:
    """The last pairs of hidden state and next word of each stream.

    Each of the B streams has its own cache. It takes memory for B x window hidden states, whatever
    the length of the streams.

    Args:
        window: W, the number of pairs that each token sees.
        block_scores: number of scores held at a time.

    Raises:
        ConfigurationError: W < 1.
    """

    def __init__(self, window: int, block_scores: int = BLOCK_SCORES) -> None:
        check_range("the cache window", window, at_least=1, whole=True)
        self.window = window
        self.block_scores = block_scores
        self.keys: Optional[Tensor] = None  # [B, at most window, d]
        self.values: Optional[Tensor] = None  # [B, at most window]

    def __call__(
        self, features: Tensor, targets: Tensor, thetas: Sequence[float]
    ) -> Tuple[Tensor, Tensor]:
        """Return the probabilities of a segment's words, and add the segment to the cache.

        Args:
            features: h of the segment, shape (B, T, d).
            targets: the word after each, shape (B, T). Padding is allowed at the right end of
                streams that have ended; no word that counts sees it.
            thetas: K values.

        Returns:
            p_cache(target), shape (K, B, T), and which tokens had a pair in their window, (T,).
        """
        streams = features.size(0)
        # t tokens have B t (W + t) scores, of which B t W are used.
        limit = self.block_scores // (2 * streams * self.window)
        step = max(min(max(self.window, MIN_BLOCK_TOKENS), limit), 1)
        parts = []
        for start in range(0, features.size(1), step):
            parts.append(
                self._block(
                    features[:, start : start + step], targets[:, start : start + step], thetas
                )
            )
        probabilities = torch.cat([part for part, _ in parts], -1)
        return probabilities, torch.cat([seen for _, seen in parts])

    def _block(
        self, queries: Tensor, targets: Tensor, thetas: Sequence[float]
    ) -> Tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            keys, values = queries, targets
        else:
            keys = torch.cat([self.keys, queries], 1)  # [B, M + T, d]
            values = torch.cat([self.values, targets], 1)  # [B, M + T]
        result = cache_probability(queries, keys, values, targets, self.window, thetas)
        # Copied, because a view would keep the whole segment in memory.
        self.keys = keys[:, -self.window :].clone()
        self.values = values[:, -self.window :].clone()
        return result


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
        """Yield the segments of all streams side by side; see :mod:`lm.evaluation`."""
        streams = ContiguousStreams(corpus, self.streams, self.padding, self.start)
        for begin in range(0, streams.length, self.segment):
            size = min(self.segment, streams.length - begin)
            yield streams.segment(begin, size, range(self.streams))

    def predict(self, segment: Segment, carry: Carry) -> ScoredSegment:
        """Run the model on one segment from the state in ``carry``, which each pass has anew."""
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
class CacheGrid:
    """A continuous cache and the values of its two parameters to evaluate.

    Attributes:
        window: W.
        thetas: K values of theta >= 0.
        weights: L values of lambda in [0, 1).
    """

    window: int
    thetas: Sequence[float]
    weights: Sequence[float]

    def check(self) -> None:
        """Refuse impossible values."""
        ContinuousCache(self.window)
        for name, values in (("theta", self.thetas), ("lambda", self.weights)):
            check_enough(len(values), 1, f"{name} of the cache", "Give one.", ConfigurationError)
        for theta in self.thetas:
            check_range("the cache's theta", theta, at_least=0)
        for weight in self.weights:
            check_range("the cache's lambda", weight, at_least=0, below=1)


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
