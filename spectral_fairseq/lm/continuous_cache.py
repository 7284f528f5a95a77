"""The continuous cache of Grave et al. 2017 for streams that come segment by segment."""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.continuous_cache import cache_probability

# Scores held at a time: 16 MiB of float32.
BLOCK_SCORES = 4 * 2**20
# Tokens that a narrow window is asked for at once, though most of their scores go unused.
SHORTEST_BLOCK = 32


class ContinuousCache:
    """The last pairs of state and next word of each stream, and what they say about the next.

    Each of the B streams has a cache of its own. Memory is B x window states, whatever the length
    of the streams.

    Args:
        window: W, pairs that each token sees.
        block_scores: products of states held at a time.

    Raises:
        ConfigurationError: W < 1.
    """

    def __init__(self, window: int, block_scores: int = BLOCK_SCORES) -> None:
        if window < 1:
            raise ConfigurationError(
                "a cache window of 1 or more", repr(window),
                "Give the number of past words that the cache holds, such as 500.",
            )  # fmt: skip
        self.window = window
        self.block_scores = block_scores
        self.keys: Optional[Tensor] = None  # [B, at most window, d]
        self.values: Optional[Tensor] = None  # [B, at most window]

    def __call__(
        self, features: Tensor, targets: Tensor, thetas: Sequence[float]
    ) -> Tuple[Tensor, Tensor]:
        """Ask for a segment's words, then remember it.

        Args:
            features: h of the segment, shape (B, T, d).
            targets: the word after each, shape (B, T); padding, at the right end of streams that
                are over, is remembered but seen by nothing that counts.
            thetas: K values.

        Returns:
            p_cache(target), shape (K, B, T), and which tokens had anything in their window, (T,).
        """
        features = features.detach()
        rows = features.size(0)
        # B t (W + t) scores of t tokens, of which B t W are used.
        step = min(max(self.window, SHORTEST_BLOCK), self.block_scores // (2 * rows * self.window))
        step = max(step, 1)
        parts = []
        for start in range(0, features.size(1), step):
            parts.append(
                self._block(
                    features[:, start : start + step], targets[:, start : start + step], thetas
                )
            )
        return torch.cat([one for one, _ in parts], -1), torch.cat([one for _, one in parts])

    def _block(
        self, queries: Tensor, targets: Tensor, thetas: Sequence[float]
    ) -> Tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            keys, values = queries, targets
        else:
            keys = torch.cat([self.keys, queries], 1)  # [B, M + T, d]
            values = torch.cat([self.values, targets], 1)  # [B, M + T]
        found = cache_probability(queries, keys, values, targets, self.window, thetas)
        # Copies, because a view would keep the whole segment alive.
        self.keys = keys[:, -self.window :].clone()
        self.values = values[:, -self.window :].clone()
        return found
