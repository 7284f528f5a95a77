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
from typing import Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError


def check_interpolation(weight: float) -> None:
    """Refuse a weight with which the mixture would have zero probabilities or none at all.

    Raises:
        ConfigurationError: lambda is outside [0, 1).
    """
    if not 0.0 <= weight < 1.0:
        raise ConfigurationError(
            "the cache's lambda in [0, 1)",
            repr(weight),
            "Give the share of the cache in the mixture, such as 0.1.",
        )


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
    if queries.dtype != torch.float64:  # exp(theta s) would amplify the roundoff of half precision
        queries, keys = queries.float(), keys.float()
    scores = torch.matmul(queries, keys.transpose(1, 2))  # [B, T, M + T]
    scores = scores.masked_fill(outside, -math.inf)
    top = scores.max(-1, keepdim=True).values
    seen = ~outside.all(-1)  # [T]
    # A row without a key would become -inf - -inf; its result is set to 0 below.
    scores = scores - torch.where(top.isinf(), torch.zeros_like(top), top)
    hit = values.unsqueeze(1) == targets.unsqueeze(2)  # [B, T, M + T]
    found = []
    for theta in thetas:
        # theta = 0 makes 0 * -inf, which is NaN, so the band is masked again.
        weights = torch.exp(theta * scores).masked_fill(outside, 0.0)
        ratio = (weights * hit).sum(-1) / weights.sum(-1)  # [B, T]
        found.append(torch.where(seen, ratio, torch.zeros_like(ratio)))
    return torch.stack(found), seen


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
    check_interpolation(weight)
    mixed = torch.logaddexp(log_model + math.log1p(-weight), torch.log(weight * cache))
    return torch.where(seen, mixed, log_model.expand_as(mixed))
