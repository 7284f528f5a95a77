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
from dataclasses import dataclass
from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError, check_enough, check_range
from spectral_fairseq.functional.precision import widened

# Number of scores held at a time: 16 MiB of float32.
BLOCK_SCORES = 4 * 2**20
# A narrow window is still evaluated for this many tokens at once, although most scores are unused.
MIN_BLOCK_TOKENS = 32


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
        """Refuse impossible values.

        Raises:
            ConfigurationError: one of them is impossible, or a list is empty.
        """
        ContinuousCache(self.window)
        for name, values in (("theta", self.thetas), ("lambda", self.weights)):
            check_enough(len(values), 1, f"{name} of the cache", "Give one.", ConfigurationError)
        for theta in self.thetas:
            check_range("the cache's theta", theta, at_least=0)
        for weight in self.weights:
            check_range("the cache's lambda", weight, at_least=0, below=1)
