"""The continuous cache: words that followed similar hidden states become more likely.

Grave, Joulin, Usunier: "Improving Neural Language Models with a Continuous Cache", ICLR 2017,
https://openreview.net/forum?id=B184E5qee, section 3, equations 2 to 4. When the model has the
hidden state h_t and x_{t+1} comes next, the cache holds the last W pairs (h_i, x_{i+1}),
i = t-W .. t-1, and

    p_cache(w) = sum_i exp(theta <h_t, h_i>) [x_{i+1} = w]  /  sum_i exp(theta <h_t, h_i>)
    p(w) = (1 - lambda) p_model(w) + lambda p_cache(w).

The window slides by one pair for each token. A block of T tokens takes one product of its T states
with W + T states, of which each row uses a band of width W.

Note [Probability of the cache in linear space]
-----------------------------------------------
p_cache is a ratio of sums of exp(theta (s - max s)), each between 0 and W. float32 loses terms
below 1e-38 of the largest, which are negligible beside (1 - lambda) p_model(w). No second logarithm
of a sum is needed, and each further theta costs one exponential for each score.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import check_range
from spectral_fairseq.functional.precision import widened


def cache_probability(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    targets: Tensor,
    window: int,
    thetas: Sequence[float],
) -> Tuple[Tensor, Tensor]:
    """Return p_cache of the next words of a block, for several theta at once.

    Query t is at the pair M + t and sees the pairs M + t - window .. M + t - 1.

    Args:
        queries: h of the block, shape (B, T, d).
        keys: h of the M pairs before the block and of the block itself, shape (B, M + T, d).
        values: the word after each key, shape (B, M + T).
        targets: words whose probability is wanted, shape (B, T).
        window: W >= 1.
        thetas: K values of theta >= 0; 0 weighs all pairs alike.

    Returns:
        p_cache(target), shape (K, B, T), and which tokens have a pair in their window, bool, shape
        (T,). Where there is no pair the probability is 0.
    """
    length, total = queries.size(1), keys.size(1)
    # The distance from each query back to each key.
    behind = torch.arange(total - length, total, device=keys.device).unsqueeze(1)
    behind = behind - torch.arange(total, device=keys.device)  # [T, M + T]
    outside = (behind < 1) | (behind > window)  # [T, M + T]
    # exp(theta s) would amplify the roundoff of half precision.
    scores = torch.matmul(widened(queries), widened(keys).transpose(1, 2))  # [B, T, M + T]
    scores = scores.masked_fill(outside, -math.inf)
    top = scores.max(-1, keepdim=True).values
    seen = ~outside.all(-1)  # [T]
    # A row without a key would become -inf - -inf; its result is set to 0 below.
    scores = scores - torch.where(top.isinf(), torch.zeros_like(top), top)
    hit = values.unsqueeze(1) == targets.unsqueeze(2)  # [B, T, M + T]
    probabilities = []
    for theta in thetas:
        # theta = 0 makes 0 * -inf, which is NaN, so the band is masked again.
        weights = torch.exp(theta * scores).masked_fill(outside, 0.0)
        ratio = (weights * hit).sum(-1) / weights.sum(-1)  # [B, T]
        probabilities.append(torch.where(seen, ratio, torch.zeros_like(ratio)))
    return torch.stack(probabilities), seen


def interpolate(log_model: Tensor, cache: Tensor, seen: Tensor, weight: float) -> Tensor:
    """Return log((1 - lambda) p_model + lambda p_cache), or log p_model where the cache is empty.

    Args:
        log_model: log p_model of the targets, shape (B, T).
        cache: p_cache of the targets, shape (*, B, T).
        seen: which tokens have a pair in their window, shape (T,).
        weight: lambda in [0, 1).

    Returns:
        Shape (*, B, T).

    Raises:
        ConfigurationError: lambda is outside [0, 1).
    """
    check_range("`weight`", weight, at_least=0, below=1)
    mixed = torch.logaddexp(log_model + math.log1p(-weight), torch.log(weight * cache))
    return torch.where(seen, mixed, log_model.expand_as(mixed))


# The update rule of dynamic evaluation, with RMS gradients and decay to the trained weights.
#
# Krause, Kahembwe, Murray, Renals: "Dynamic Evaluation of Neural Sequence Models", ICML 2018,
# https://proceedings.mlr.press/v80/krause18a.html, section 5. With g the gradient of the segment
# just scored, W_0 the trained weights and R the elementwise root mean square of the gradient over
# the batches of the training corpus,
#
#     W <- W + lambda D (W_0 - W) - eta g / (R + epsilon),     D = R / mean(R), at most 1 / lambda.
#
# The mean is that of the authors' code, with which the published values of lambda were found: the
# mean over the parameter tensors of each tensor's mean, so that a bias weighs as much as a table.
#
# Note [Two units of the published values]
# ----------------------------------------
# The first version of the authors' code, on which that of the mixture-of-softmaxes paper is based,
# uses the square root of a *sum* over n batches for R and a *sum* over the P parameter tensors for
# the mean. The values published with it (eta 0.002, lambda 0.02 or 0.075, epsilon 0.001 or
# 0.002) become those of the equations above as eta / sqrt(n), lambda / P and epsilon / sqrt(n): for
# Penn Treebank, 1859 batches and 14 tensors, 4.6e-5, 0.0014 and 2.3e-5, next to the later version's
# defaults 5e-5, 0.002 and 2e-5.


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
