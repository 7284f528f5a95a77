"""The continuous cache: words seen after states like the present one become more likely.

Grave, Joulin, Usunier: "Improving Neural Language Models with a Continuous Cache", ICLR 2017,
section 3, equations 2 to 4. Where the model stands in the state h_t and x_{t+1} comes next, the
cache holds the last W pairs (h_i, x_{i+1}), i = t-W .. t-1, and

    p_cache(w) = sum_i exp(theta <h_t, h_i>) [x_{i+1} = w]  /  sum_i exp(theta <h_t, h_i>)
    p(w) = (1 - lambda) p_model(w) + lambda p_cache(w).

The window slides by one pair a token. For a block of T tokens it is one product of T states with
W + T of them, of which each row uses a band of width W.

Note [Probability of the cache in linear space]
-----------------------------------------------
p_cache is a ratio of sums of exp(theta (s - max s)), each between 0 and W. What float32 loses
are terms below 1e-38 of the largest; they would be added to (1 - lambda) p_model(w), next to
which they do not exist. So no second logarithm of a sum is needed, and several theta cost one
exponential a score each.
"""

from __future__ import annotations

import math
from typing import Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError


def check_interpolation(weight: float) -> None:
    """Refuse a lambda that makes no distribution with full support.

    Raises:
        ConfigurationError: outside [0, 1).
    """
    if not 0.0 <= weight < 1.0:
        raise ConfigurationError(
            "the cache's lambda in [0, 1)", repr(weight),
            "Give the share of the cache in the mixture, such as 0.1.",
        )  # fmt: skip


def cache_probability(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    targets: Tensor,
    window: int,
    thetas: Sequence[float],
) -> Tuple[Tensor, Tensor]:
    """p_cache of the next words of a block, for several theta at once.

    Query t stands at the pair M + t, so it sees the pairs M + t - window .. M + t - 1.

    Args:
        queries: h of the block, shape (B, T, d).
        keys: h of the M pairs before the block and of the block itself, shape (B, M + T, d).
        values: the word after each key, shape (B, M + T).
        targets: words whose probability is asked for, shape (B, T).
        window: W >= 1.
        thetas: flatness of the distribution, K values >= 0.

    Returns:
        p_cache(target), shape (K, B, T), and which tokens have anything in their window, bool,
        shape (T,). Where there is nothing the probability is 0.
    """
    length, total = queries.size(1), keys.size(1)
    # How far each key lies behind each query.
    behind = torch.arange(total - length, total, device=keys.device).unsqueeze(1)
    behind = behind - torch.arange(total, device=keys.device)  # [T, M + T]
    outside = (behind < 1) | (behind > window)  # [T, M + T]
    scores = torch.matmul(queries, keys.transpose(1, 2))  # [B, T, M + T]
    if scores.dtype != torch.float64:
        scores = scores.float()
    scores = scores.masked_fill(outside, -math.inf)
    top = scores.max(-1, keepdim=True).values
    seen = ~outside.all(-1)  # [T]
    # A row without any key would be -inf - -inf; it is set to 0 at the end.
    scores = scores - torch.where(top.isinf(), torch.zeros_like(top), top)
    hit = values.unsqueeze(1) == targets.unsqueeze(2)  # [B, T, M + T]
    found = []
    for theta in thetas:
        # 0 * -inf is no number: the band is cut out again.
        weights = torch.exp(theta * scores).masked_fill(outside, 0.0)
        ratio = (weights * hit).sum(-1) / weights.sum(-1)  # [B, T]
        found.append(torch.where(seen, ratio, torch.zeros_like(ratio)))
    return torch.stack(found), seen


def interpolate(log_model: Tensor, cache: Tensor, seen: Tensor, weight: float) -> Tensor:
    """log((1 - lambda) p_model + lambda p_cache); log p_model where the cache holds nothing.

    Args:
        log_model: log p_model of the targets, shape (B, T).
        cache: p_cache of the targets, shape (*, B, T).
        seen: which tokens have anything in their window, shape (T,).
        weight: lambda in [0, 1).

    Returns:
        Shape (*, B, T).

    Raises:
        ConfigurationError: lambda outside [0, 1).
    """
    check_interpolation(weight)
    mixed = torch.logaddexp(log_model + math.log1p(-weight), torch.log(weight * cache))
    return torch.where(seen, mixed, log_model.expand_as(mixed))
