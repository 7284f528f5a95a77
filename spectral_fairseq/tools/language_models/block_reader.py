"""Language models without a state, which read a corpus in blocks."""

from __future__ import annotations

import inspect
from typing import Any, Iterator

import torch
from fairseq.models import FairseqDecoder, FairseqIncrementalDecoder
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.lm.awd_lstm import Carry
from spectral_fairseq.lm.evaluation import Corpus, Predictions, Reader, Segment


class BlockReader(Reader):
    """Feeds a model without a state with blocks; see lm/evaluation.py, Note [How a corpus is cut].

    Args:
        model: one of fairseq's language models.
        padding: index of the padding symbol.
        start: index of the token that precedes the corpus.
        block: T, tokens that the model sees at a time.
        context: C < T, the tokens at the start of a block that repeat the end of the one before.
        rows: number of blocks that are run together.

    Raises:
        ConfigurationError: C outside [0, T), or T above what the model can take.
    """

    def __init__(
        self, model: Any, padding: int, start: int, block: int, context: int, rows: int
    ) -> None:
        super().__init__(model, padding, start)
        if not 0 <= context < block:
            raise ConfigurationError(
                f"--context-window of 0 or more and below --segment, {block}",
                str(context),
                "Give a smaller context or longer segments.",
            )
        longest = model.max_positions()
        if block > longest:
            raise ConfigurationError(
                f"--segment of at most {longest}, the model's --max-target-positions",
                str(block),
                "Give shorter segments.",
            )
        self.block = block
        self.context = context
        self.rows = rows
        # Both base classes have a method of this name that only raises.
        missing = (FairseqDecoder.extract_features, FairseqIncrementalDecoder.extract_features)
        own = type(model.decoder).extract_features not in missing
        # That of hf_gpt2 has no such argument, and returns a tensor and not a pair.
        usual = "encoder_out" in inspect.signature(model.decoder.extract_features).parameters
        self.shows_features = own and usual and hasattr(model.decoder, "output_layer")

    def segments(self, corpus: Corpus) -> Iterator[Segment]:
        """Cut the corpus into batches of blocks; see the base class."""
        total, stride = len(corpus), self.block - self.context
        for first in range(0, total, stride * self.rows):
            last = min(first + stride * self.rows, total)
            places = []
            for begin in range(first, last, stride):
                places.append((max(0, begin - self.context), begin, min(begin + stride, total)))
            width = max(end - left for left, _, end in places)
            tokens = torch.full((len(places), width), self.padding)
            targets = torch.full((len(places), width), self.padding)
            for row, (left, begin, end) in enumerate(places):
                tokens[row, : end - left] = self.inputs(corpus, left, end)
                targets[row, begin - left : end - left] = corpus[begin:end].long()
            yield Segment(tokens, targets)

    def predict(self, segment: Segment, carry: Carry) -> Predictions:  # noqa: ARG002  (no state)
        """Run one batch of blocks; they follow each other, so they are returned as one stream."""
        tokens, targets = segment.tokens.to(self.device), segment.targets.to(self.device)
        counted = targets.ne(self.padding)
        features = None
        if self.shows_features:
            # Only where something is predicted: the context needs no output layer.
            hidden, extra = self.model.decoder.extract_features(tokens, encoder_out=None)
            features = hidden[counted].unsqueeze(0)  # [1, n, d_h]
            targets = targets[counted].unsqueeze(0)  # [1, n]
            output = (self.model.decoder.output_layer(features), extra)
        else:
            output = self.model(tokens, src_lengths=tokens.ne(self.padding).sum(1))
        clusters = getattr(self.model.decoder, "adaptive_softmax", None)
        if clusters is not None:
            log_probabilities = _adaptive(clusters, output[0], targets)
        else:
            log_probabilities = (
                self.model.get_normalized_probs(output, log_probs=True, sample={"target": targets})
                .gather(-1, targets.unsqueeze(-1))
                .squeeze(-1)
            )
        if not self.shows_features:
            log_probabilities = log_probabilities[counted].unsqueeze(0)
            targets = targets[counted].unsqueeze(0)
        return Predictions(log_probabilities, targets, targets.ne(self.padding), features)


def _adaptive(clusters: Any, features: Tensor, targets: Tensor) -> Tensor:
    """log P(target) of fairseq's AdaptiveSoftmax, differentiable, in the shape of ``targets``.

    Its own ``get_log_prob`` computes the scores of all words, and overwrites tensors that the
    gradients of dynamic evaluation need.

    Args:
        clusters: in evaluation mode.
        features: shape (B, T, d).
        targets: shape (B, T).
    """
    scores, columns = clusters(features, targets)  # of the head, then of each cluster with a target
    _, rows = clusters.adapt_target(targets)
    parts = [torch.log_softmax(scores[0], -1).gather(1, columns[0].unsqueeze(1)).squeeze(1)]
    for row, score, column in zip(rows, scores[1:], columns[1:]):
        if row is not None:
            within = torch.log_softmax(score, -1).gather(1, column.unsqueeze(1)).squeeze(1)
            parts.append(torch.zeros_like(parts[0]).index_copy(0, row, within))
    return torch.stack(parts).sum(0).view_as(targets)
