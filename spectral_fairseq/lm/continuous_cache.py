"""The continuous cache of Grave et al. for streams that are read segment by segment.

The equations are in :mod:`spectral_fairseq.functional.adaptation` (Grave, Joulin, Usunier,
ICLR 2017, https://openreview.net/forum?id=B184E5qee).
"""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.adaptation import cache_probability

# Number of scores held at a time: 16 MiB of float32.
BLOCK_SCORES = 4 * 2**20
# A narrow window is still evaluated for this many tokens at once, although most scores are unused.
MIN_BLOCK_TOKENS = 32


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
        if window < 1:
            raise ConfigurationError(
                "a cache window of 1 or more",
                repr(window),
                "Give the number of past words that the cache holds, such as 500.",
            )
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
        features = features.detach()
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
        # Copied, because a view would keep the whole segment in memory.
        self.keys = keys[:, -self.window :].clone()
        self.values = values[:, -self.window :].clone()
        return found
