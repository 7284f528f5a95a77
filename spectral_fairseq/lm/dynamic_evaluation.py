"""Dynamic evaluation: the model goes on learning from the text that it has just been scored on.

Krause et al., ICML 2018; the rule itself is :mod:`spectral_fairseq.functional.dynamic_update`. The
model stays in evaluation mode throughout: dropout and weight drop are off, gradients flow.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.dynamic_update import (
    DynamicRates,
    decay_factors,
    dynamic_update_,
    mean_of_means,
    step_sizes,
)
from spectral_fairseq.lm.carry import Carry
from spectral_fairseq.lm.evaluation import Corpus, Progress, Reader, differentiable


def check_rates(rates: DynamicRates) -> None:
    """Refuse rates that make no update.

    Raises:
        ConfigurationError: eta or lambda below 0, or epsilon not above 0.
    """
    for name, value, positive in (
        ("rate (eta)", rates.rate, False),
        ("decay (lambda)", rates.decay, False),
        ("epsilon", rates.epsilon, True),
    ):
        if not math.isfinite(value) or value < 0.0 or (positive and value == 0.0):
            raise ConfigurationError(
                f"a {name} of dynamic evaluation {'above 0' if positive else 'of 0 or more'}",
                repr(value),
                "Give such a value; published ones are the defaults.",
            )


def adapted_parameters(model: Any) -> List[Tensor]:
    """The parameters that dynamic evaluation moves: all that can be trained, shared ones once."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@dataclass
class GradientStatistics:
    """Of the training corpus.

    Attributes:
        rms: R, one tensor for each of :func:`adapted_parameters`.
        mean: mean(R).
        batches: over which they were gathered.
    """

    rms: List[Tensor]
    mean: float
    batches: int


def gradient_statistics(
    reader: Reader,
    corpus: Corpus,
    batches: Optional[int] = None,
    progress: Progress = lambda tokens: None,
) -> GradientStatistics:
    """Root mean square of the gradient of each batch's mean loss, element by element.

    Args:
        reader: the trained model, reading batches of the published 100 streams x 5 tokens, say.
        corpus: the training corpus.
        batches: how many to use, the first ones; None for all.
        progress: called after each batch.

    Raises:
        ConfigurationError: fewer than one batch.
        DataError: a corpus too short for the reader.
    """
    if batches is not None and batches < 1:
        raise ConfigurationError(
            "at least one batch for the gradient statistics", repr(batches), "Give more."
        )
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
    """Adapts a model while in a ``with`` block, and gives its trained weights back after it.

    Args:
        model: trained, in evaluation mode.
        statistics: of its training corpus.
        rates: eta, lambda, epsilon.

    Raises:
        ConfigurationError: impossible rates.
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
        """One step of the rule.

        Args:
            loss: of the segment just scored, with its graph.
        """
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        with torch.no_grad():
            for parameter, trained, gradient, (decays, steps) in zip(
                self.parameters, self._trained, gradients, self._factors
            ):
                if gradient is not None:
                    dynamic_update_(parameter, trained, gradient, decays, steps)
