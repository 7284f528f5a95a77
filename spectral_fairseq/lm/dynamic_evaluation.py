"""Dynamic evaluation, and the grid search over its parameters and those of the cache.

The update rule is in :mod:`spectral_fairseq.functional.adaptation`. The model stays in evaluation
mode throughout: dropout and weight drop are off, and gradients are computed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError, check_enough, check_range
from spectral_fairseq.functional.adaptation import (
    DynamicRates,
    decay_factors,
    dynamic_update_,
    mean_of_means,
    step_sizes,
)
from spectral_fairseq.functional.progress import ProgressCallback, ignore_progress
from spectral_fairseq.lm.awd_lstm import Carry
from spectral_fairseq.lm.evaluation import (
    CacheGrid,
    Corpus,
    Evaluation,
    StreamReader,
    differentiable,
    evaluate,
    perplexity,
)


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
    reader: StreamReader,
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


def evaluate_adapting(
    reader: StreamReader, corpus: Corpus, dynamic: Optional[DynamicEvaluation], **how: Any
) -> Evaluation:
    """:func:`~spectral_fairseq.lm.evaluation.evaluate` of a model that adapts, if it is to."""
    if dynamic is None:
        return evaluate(reader, corpus, **how)
    with dynamic:
        return evaluate(reader, corpus, update=dynamic.update, **how)


# Grid search over the parameters of the cache and of dynamic evaluation, on a validation corpus.
#
# The cache takes one pass of the model whatever its grid, because theta and lambda only change how
# the model's results are mixed. Dynamic evaluation changes the model itself and takes one pass for
# each point of its grid.

CACHE_THETAS = (0.1, 0.2, 0.3, 0.5, 0.662, 0.8, 1.0, 1.3)
CACHE_WEIGHTS = (0.02, 0.05, 0.1, 0.1279, 0.15, 0.2, 0.25, 0.3, 0.4)
"""They surround the values published for AWD-LSTM: (1.0, 0.1) on PTB, (0.662, 0.1279) on WT2."""

DYNAMIC_SEGMENT = 5
DYNAMIC_RATES = (3e-5, 4e-5, 5e-5, 6e-5, 7e-5, 1e-4)
DYNAMIC_DECAYS = (0.001, 0.002, 0.003, 0.005)
"""The grid of the authors' code for segments of 5 tokens; both axes scale with their length."""


@dataclass
class GridSearch:
    """All points of one search.

    Attributes:
        method: ``cache`` or ``dynamic``.
        tokens: number of tokens of the validation corpus on which each point was evaluated.
        points: in the order of the grid, with the first axis outermost: the value of each
            parameter, by its name, and the ``perplexity``, infinite where the model diverged.
    """

    method: str
    tokens: int
    points: List[Dict[str, float]]

    @property
    def best(self) -> Dict[str, float]:
        """The first point with the lowest perplexity.

        Raises:
            ConfigurationError: the model diverged at every point.
        """
        best = min(self.points, key=lambda point: point["perplexity"])
        what = f"the best perplexity in the grid of {self.method} evaluation"
        check_range(what, best["perplexity"], at_least=0, remedy="Search smaller values.")
        return best

    @property
    def ends(self) -> Dict[str, str]:
        """Parameters whose best value lies at an end of their axis -> ``smallest`` or ``largest``.

        Zero is the least value there is, so it is no end; nor is the only value of an axis.
        """
        ends = {}
        for name, best in self.best.items():
            values = {point[name] for point in self.points}
            if name == "perplexity" or len(values) == 1:
                continue
            if best == max(values):
                ends[name] = "largest"
            elif best == min(values) and best > 0:
                ends[name] = "smallest"
        return ends


def check_dynamic_grid(rates: Sequence[float], decays: Sequence[float], epsilon: float) -> None:
    """Refuse a grid with an impossible point."""
    there = min(len(rates), len(decays))
    check_enough(there, 1, "value on each axis of the grid", "Give one.", ConfigurationError)
    for rate in rates:
        for decay in decays:
            check_rates(DynamicRates(rate, decay, epsilon))


def search_cache(
    reader: StreamReader,
    corpus: Corpus,
    grid: CacheGrid,
    dynamic: Optional[DynamicEvaluation] = None,
    progress: ProgressCallback = ignore_progress,
) -> GridSearch:
    """Evaluate every theta with every lambda, in one pass of a model that may adapt meanwhile."""
    evaluated = evaluate_adapting(reader, corpus, dynamic, cache=grid, progress=progress)
    points = [
        {"theta": theta, "lambda": weight, "perplexity": perplexity(nll, evaluated.tokens)}
        for theta, row in zip(grid.thetas, evaluated.cached)
        for weight, nll in zip(grid.weights, row)
    ]
    return GridSearch("cache", evaluated.tokens, points)


def search_dynamic(
    reader: StreamReader,
    corpus: Corpus,
    statistics: GradientStatistics,
    rates: Sequence[DynamicRates],
    labels: Sequence[Dict[str, float]],
    progress: ProgressCallback = ignore_progress,
) -> GridSearch:
    """Evaluate every given point in turn, each starting from the trained weights.

    ``labels`` are the values to report for each point. The trained weights are restored.
    """
    points, tokens = [], 0
    for point, label in zip(rates, labels):
        dynamic = DynamicEvaluation(reader.model, statistics, point)
        evaluated = evaluate_adapting(reader, corpus, dynamic, progress=progress)
        tokens = evaluated.tokens
        points.append({**label, "perplexity": perplexity(evaluated.nll, tokens)})
    return GridSearch("dynamic", tokens, points)
