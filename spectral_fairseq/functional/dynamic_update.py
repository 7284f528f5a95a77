"""The update rule of dynamic evaluation, with RMS gradients and decay to the trained weights.

Krause, Kahembwe, Murray, Renals: "Dynamic Evaluation of Neural Sequence Models", ICML 2018,
https://proceedings.mlr.press/v80/krause18a.html, section 5. With g the gradient of the segment just
scored, W_0 the trained weights and R the elementwise root mean square of the gradient over the
batches of the training corpus,

    W <- W + lambda D (W_0 - W) - eta g / (R + epsilon),     D = R / mean(R), at most 1 / lambda.

The mean is that of the authors' code, with which the published values of lambda were found: the
mean over the parameter tensors of each tensor's mean, so that a bias weighs as much as a table.

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

import math
from typing import NamedTuple, Optional, Sequence

import torch
from torch import Tensor


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
