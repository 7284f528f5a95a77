"""The adaptive softmax as output layer, over a table that may be stored in factors.

See :mod:`spectral_fairseq.functional.losses.adaptive_softmax` for the distribution and its loss.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.losses.adaptive_softmax import (
    adaptive_cross_entropy,
    adaptive_log_probabilities,
    check_cutoffs,
)
from spectral_fairseq.heads.base import Head


class AdaptiveSoftmaxHead(Head):
    """Log-probabilities by way of clusters of words, from one table cut at the cutoffs.

    The dictionary must list its words in order of falling frequency, as fairseq-preprocess does.
    Each cluster has a vector and a bias of its own beside the table, each word a bias.

    Args:
        table: one of :mod:`spectral_fairseq.embeddings`; it may be shared with look-ups.
        cutoffs: first word of each cluster, rising: 20000, 40000, 200000 cut 267,735 words into
            a head of 20,000 words and three clusters.
        init_std: the clusters' vectors start from N(0, init_std).

    Raises:
        ConfigurationError: cutoffs that do not rise, or reach the size of the table.
    """

    # Scores of all words for all tokens are what it exists to avoid.
    own_loss = True
    own_loss_in_evaluation = True

    def __init__(self, table: Any, cutoffs: Sequence[int], init_std: float = 0.02) -> None:
        super().__init__(table)
        self.cutoffs = check_cutoffs(cutoffs, table.num_embeddings)
        self.cluster_weight = nn.Parameter(
            init_std * torch.randn(len(self.cutoffs), table.embedding_dim)
        )
        self.cluster_bias = nn.Parameter(torch.zeros(len(self.cutoffs)))
        self.bias = nn.Parameter(torch.zeros(table.num_embeddings))

    def forward(self, features: Tensor) -> Tensor:
        """log P of ``features``, shape (*, d): shape (*, N), float32, in vocabulary order.

        It is normalised: log_softmax leaves it as it is.
        """
        contexts, matrix = self.table.operands(features)
        clusters = self._cluster_scores(features)
        return adaptive_log_probabilities(contexts, clusters, matrix, self.bias, self.cutoffs)

    def loss(
        self,
        features: Tensor,
        targets: Tensor,
        label_smoothing: float = 0.0,
        ignore_index: Optional[int] = None,
    ) -> Tuple[Tensor, Tensor]:
        """As in the base, from the head and the clusters of the targets alone.

        Raises:
            ConfigurationError: label smoothing, which needs the probability of every word.
        """
        self.check_label_smoothing(label_smoothing)
        features, targets = features.flatten(0, -2), targets.flatten()
        if ignore_index is not None:
            kept = targets.ne(ignore_index)
            features, targets = features[kept], targets[kept]
        contexts, matrix = self.table.operands(features)
        clusters = self._cluster_scores(features)
        nll = adaptive_cross_entropy(contexts, clusters, targets, matrix, self.bias, self.cutoffs)
        return nll, nll.detach()

    def check_label_smoothing(self, label_smoothing: float) -> None:
        """As in the base.

        Raises:
            ConfigurationError: any, since it needs the probability of every word.
        """
        if label_smoothing:
            raise ConfigurationError(
                "--label-smoothing 0 with an adaptive softmax",
                repr(label_smoothing),
                "Drop the flag, or use a full softmax (--adaptive-softmax-cutoff ''): smoothing "
                "needs every word's probability, which is what the clusters save.",
            )

    def extra_repr(self) -> str:
        """What ``print(model)`` shows in the brackets."""
        return f"cutoffs={','.join(map(str, self.cutoffs))}"

    def _cluster_scores(self, features: Tensor) -> Tensor:
        return nn.functional.linear(features, self.cluster_weight, self.cluster_bias)
