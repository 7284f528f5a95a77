"""Dynamic evaluation: a model adapts to the text it reads, by RMS gradients with decay to W_0.

Krause, Kahembwe, Murray, Renals: "Dynamic Evaluation of Neural Sequence Models", ICML 2018,
https://proceedings.mlr.press/v80/krause18a.html, section 5. With g the gradient of the segment
just scored, W_0 the trained weights and R the elementwise root mean square of the gradient over
the batches of the training corpus,

    W <- W + lambda D (W_0 - W) - eta g / (R + epsilon),     D = R / mean(R), at most 1 / lambda.

The mean is that of the authors' code, with which the published values of lambda were found: the
mean over the parameter tensors of each tensor's mean, so that a bias weighs as much as a table.

The model stays in evaluation mode throughout: dropout and weight drop are off, and gradients are
computed.

Note [Two units of the published values]
----------------------------------------
The first version of the authors' code, on which that of the mixture-of-softmaxes paper is based,
uses the square root of a *sum* over n batches for R and a *sum* over the P parameter tensors for
the mean. The values published with it (eta 0.002, lambda 0.02 or 0.075, epsilon 0.001 or
0.002) become those of the equations above as eta / sqrt(n), lambda / P and epsilon / sqrt(n): for
Penn Treebank, 1859 batches and 14 tensors, 4.6e-5, 0.0014 and 2.3e-5, next to the later version's
defaults 5e-5, 0.002 and 2e-5.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import check_range
from spectral_fairseq.functional.progress import ProgressCallback, ignore_progress
from spectral_fairseq.lm.carry import Carry
from spectral_fairseq.lm.evaluation import Evaluation, StreamReader, differentiable, evaluate
from spectral_fairseq.lm.streams import Corpus


class DynamicRates(NamedTuple):
    """The three numbers of the update rule.

    Attributes:
        rate: eta.
        decay: lambda, the mean rate of decay to the trained weights.
        epsilon: added to the root mean square.
    """

    rate: float
    decay: float
    epsilon: float

    def from_sums(self, batches: int, tensors: int) -> DynamicRates:
        """Return values published for sums as values for means.

        See Note [Two units of the published values].

        Args:
            batches: n, over which the squared gradients were collected.
            tensors: P, the number of parameter tensors.
        """
        root = math.sqrt(batches)
        return DynamicRates(self.rate / root, self.decay / tensors, self.epsilon / root)


def mean_of_means(rms: Sequence[Tensor]) -> float:
    """Return mean(R), the mean over tensors of each tensor's mean.

    Args:
        rms: R, one tensor for each parameter.
    """
    return sum(float(tensor.double().mean()) for tensor in rms) / len(rms)


def decay_factors(rms: Tensor, mean_rms: float, decay: float) -> Tensor:
    """Return lambda D, by which share of its distance to W_0 each weight returns; at most 1.

    Args:
        rms: R of one parameter.
        mean_rms: mean(R) of all parameters; 0 means that there was no gradient, and gives no decay.
        decay: lambda.
    """
    if mean_rms == 0.0:
        return torch.zeros_like(rms)
    return (rms * (decay / mean_rms)).clamp_(max=1.0)


def step_sizes(rms: Tensor, rate: float, epsilon: float) -> Tensor:
    """Return eta / (R + epsilon).

    Args:
        rms: R of one parameter.
        rate: eta.
        epsilon: greater than 0.
    """
    return rate / (rms + epsilon)


def dynamic_update_(
    weight: Tensor, trained: Tensor, gradient: Optional[Tensor], decays: Tensor, steps: Tensor
) -> Tensor:
    """Set W to W + decays (W_0 - W) - steps g, in place and in two passes over the weights.

    Args:
        weight: W.
        trained: W_0.
        gradient: g at W; None stands for zeros.
        decays: from :func:`decay_factors`.
        steps: from :func:`step_sizes`.

    Returns:
        ``weight``.
    """
    weight.lerp_(trained, decays)
    return weight if gradient is None else weight.addcmul_(steps, gradient, value=-1.0)


def check_rates(rates: DynamicRates) -> None:
    """Refuse eta or lambda below 0, and an epsilon that is not above 0.

    Raises:
        ConfigurationError: one of them is out of its range.
    """
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
