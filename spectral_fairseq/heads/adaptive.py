"""The adaptive softmax as output layer, over a table of any kind.

The distribution and its loss are in :mod:`spectral_fairseq.functional.adaptive_loss`.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import torch
from torch import Tensor, nn

from spectral_fairseq.embeddings.table import Table
from spectral_fairseq.errors import ConfigurationError, misspelt, plainly
from spectral_fairseq.functional.adaptive_loss import (
    adaptive_cross_entropy,
    adaptive_log_probabilities,
    check_cutoffs,
)
from spectral_fairseq.functional.blocks import without_ignored
from spectral_fairseq.functional.products import linear
from spectral_fairseq.functional.softmax_loss import Losses
from spectral_fairseq.heads.head import Head, HeadSpec
from spectral_fairseq.options import Option

# Of Transformer-XL on WikiText-103.
PUBLISHED_CUTOFFS = "20000,40000,200000"


def parse_cutoffs(text: Optional[str]) -> List[int]:
    """The cutoffs in a text such as ``20000,40000``; ``None`` stands for the published ones.

    Raises:
        ConfigurationError: ``text`` is not a list of whole numbers.
    """
    text = PUBLISHED_CUTOFFS if text is None else text
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        wanted = f"`cutoffs` to be whole numbers separated by commas, such as {PUBLISHED_CUTOFFS}"
        raise misspelt(wanted, text) from None


class AdaptiveSoftmaxHead(Head):
    """Log-probabilities through clusters of words, over one table that is cut at the cutoffs.

    The dictionary must list its words in order of falling frequency, as fairseq-preprocess does.
    Each cluster has a vector and a bias beside the table, and each word has a bias.

    Args:
        table: W, which look-ups may share.
        cutoffs: first word of each cluster, rising: 20000, 40000, 200000 cut 267,735 words into
            a head of 20,000 words and three clusters.
        init_std: the clusters' vectors start from N(0, init_std).

    Raises:
        ConfigurationError: cutoffs that do not rise, or reach the size of the table.
    """

    kind = "adaptive"
    summary = "an adaptive softmax"
    options = (
        Option(
            "adaptive_softmax_cutoff",
            None,
            "first word of each cluster of the adaptive softmax, comma separated; "
            f"{PUBLISHED_CUTOFFS} for a softmax head if unset, '' for a full softmax",
            type=Optional[str],
            parse=parse_cutoffs,
            argument="cutoffs",
        ),
    )
    # The clusters exist so that nobody computes the scores of all words for all tokens.
    own_loss = True

    def __init__(self, table: Table, cutoffs: Sequence[int], init_std: float = 0.02) -> None:
        super().__init__(table)
        self.cutoffs = check_cutoffs(cutoffs, table.num_embeddings)
        self.cluster_weight = nn.Parameter(
            init_std * torch.randn(len(self.cutoffs), table.embedding_dim)
        )
        self.cluster_bias = nn.Parameter(torch.zeros(len(self.cutoffs)))
        self.bias = nn.Parameter(torch.zeros(table.num_embeddings))

    @classmethod
    def build(cls, table: Table, spec: HeadSpec, **options: Any) -> AdaptiveSoftmaxHead:
        """A new head; the features must be as wide as the table, and it always has a bias."""
        return cls(table, init_std=spec.init_std, **options)

    def forward(self, features: Tensor) -> Tensor:
        """log P of ``features``, shape (*, d): shape (*, N), float32, in vocabulary order.

        It is normalised: log_softmax leaves it as it is.
        """
        contexts, matrix = self.table.operands(features)
        clusters = self._cluster_scores(features)
        return adaptive_log_probabilities(contexts, clusters, matrix, self.bias, self.cutoffs)

    def checked_loss(self, features: Tensor, targets: Tensor, **options: Any) -> Losses:
        """Return the loss of the head and of the clusters of the targets.

        Raises:
            ConfigurationError: label smoothing, which needs the probability of every word.
        """
        self.check_label_smoothing(options["label_smoothing"])
        targets, features = without_ignored(
            options["ignore_index"], targets.flatten(), features.flatten(0, -2)
        )
        contexts, matrix = self.table.operands(features)
        clusters = self._cluster_scores(features)
        nll = adaptive_cross_entropy(contexts, clusters, targets, matrix, self.bias, self.cutoffs)
        plain = nll.detach().clone()  # whoever divides the loss in place does not change it
        return Losses(nll, plain, plain, torch.zeros_like(plain))

    def check_label_smoothing(self, label_smoothing: float) -> None:
        """Raise an error if labels are to be smoothed.

        Raises:
            ConfigurationError: ``label_smoothing`` is not 0. It needs the probability of every
                word, which the clusters avoid.
        """
        if label_smoothing:
            raise ConfigurationError(
                "`label_smoothing` 0 with an adaptive softmax",
                plainly(label_smoothing),
                "Use 0, or a full softmax (empty `cutoffs`): smoothing needs the probability of "
                "every word, which the clusters avoid computing.",
            )

    def extra_repr(self) -> str:
        """What ``print(model)`` shows in the brackets."""
        return f"cutoffs={','.join(map(str, self.cutoffs))}"

    def _cluster_scores(self, features: Tensor) -> Tensor:
        return linear(features, self.cluster_weight, self.cluster_bias)
