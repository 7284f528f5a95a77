"""Dynamic evaluation: the model keeps learning from the text on which it has just been scored.

Krause et al., ICML 2018, https://proceedings.mlr.press/v80/krause18a.html; the update rule is in
:mod:`spectral_fairseq.functional.adaptation`. The model stays in evaluation mode throughout:
dropout and weight drop are off, and gradients are computed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import check_range
from spectral_fairseq.functional.adaptation import (
    DynamicRates,
    decay_factors,
    dynamic_update_,
    mean_of_means,
    step_sizes,
)
from spectral_fairseq.functional.products import ProgressCallback, ignore_progress
from spectral_fairseq.lm.awd_lstm import Carry
from spectral_fairseq.lm.evaluation import Corpus, Reader, differentiable


def check_rates(rates: DynamicRates) -> None:
    """Refuse eta or lambda below 0, and an epsilon that is not above 0."""
    check_range("the rate (eta) of dynamic evaluation", rates.rate, at_least=0)
    check_range("the decay (lambda) of dynamic evaluation", rates.decay, at_least=0)
    check_range("the epsilon of dynamic evaluation", rates.epsilon, above=0)


def adapted_parameters(model: Any) -> List[Tensor]:
    """Return the parameters that dynamic evaluation changes: all trainable ones, each once."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@dataclass
class GradientStatistics:
    """Statistics of the gradients over the training corpus.

    Attributes:
        rms: R, one tensor for each of :func:`adapted_parameters`.
        mean: mean(R).
        batches: the number of batches over which they were collected.
    """

    rms: List[Tensor]
    mean: float
    batches: int


def gradient_statistics(
    reader: Reader,
    corpus: Corpus,
    batches: Optional[int] = None,
    progress: ProgressCallback = ignore_progress,
) -> GradientStatistics:
    """Return the elementwise root mean square of the gradients of the batches' mean losses.

    Args:
        reader: the trained model; the published batches have 100 streams x 5 tokens.
        corpus: the training corpus.
        batches: use only this number of batches, the first ones; None for all.
        progress: called after each batch with its number of tokens.

    Raises:
        ConfigurationError: fewer than one batch.
        DataError: the corpus is too short for the reader.
    """
    check_range("`batches`", batches, at_least=1, whole=True, optional=True)
    parameters = adapted_parameters(reader.model)
    squares = [torch.zeros_like(parameter) for parameter in parameters]
    carry, count = Carry(), 0
    for segment in itertools.islice(reader.segments(corpus), batches):
        with differentiable():
            predicted = reader.predict(segment, carry)
            gradients = torch.autograd.grad(predicted.mean_nll(), parameters, allow_unused=True)
        for square, gradient in zip(squares, gradients):
            if gradient is not None:
                square.addcmul_(gradient, gradient)
        count += 1
        progress(int(predicted.counted.sum()))
    rms = [square.div_(count).sqrt_() for square in squares]
    return GradientStatistics(rms, mean_of_means(rms), count)


class DynamicEvaluation:
    """Context manager that adapts a model and restores its trained weights at the end.

    Args:
        model: a trained model in evaluation mode.
        statistics: of its training corpus.
        rates: eta, lambda and epsilon.

    Raises:
        ConfigurationError: rates outside their range.
    """

    def __init__(self, model: Any, statistics: GradientStatistics, rates: DynamicRates) -> None:
        check_rates(rates)
        self.parameters = adapted_parameters(model)
        self.statistics = statistics
        self.rates = rates
        self._trained: List[Tensor] = []
        self._factors: List[Tuple[Tensor, Tensor]] = []

    def __enter__(self) -> DynamicEvaluation:
        self._trained = [parameter.detach().clone() for parameter in self.parameters]
        rate, decay, epsilon = self.rates
        self._factors = [
            (decay_factors(rms, self.statistics.mean, decay), step_sizes(rms, rate, epsilon))
            for rms in self.statistics.rms
        ]
        return self

    def __exit__(self, *unused: Any) -> None:
        with torch.no_grad():
            for parameter, trained in zip(self.parameters, self._trained):
                parameter.copy_(trained)
        self._trained, self._factors = [], []

    def update(self, loss: Tensor) -> None:
        """Apply the update rule once.

        Args:
            loss: of the segment just scored, attached to its graph.
        """
        # A cluster of an adaptive softmax without a target has no gradient.
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        with torch.no_grad():
            for parameter, trained, gradient, (decays, steps) in zip(
                self.parameters, self._trained, gradients, self._factors
            ):
                dynamic_update_(parameter, trained, gradient, decays, steps)
