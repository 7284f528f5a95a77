"""The single softmax, p(y | h) = softmax(W h)_y, over a table that may be stored in factors."""

# No "from __future__ import annotations" here: TorchScript reads the annotations.
from typing import Optional, Tuple

from torch import Tensor

from spectral_fairseq.functional.blockwise import blockwise_cross_entropy
from spectral_fairseq.heads.base import Head


class SoftmaxHead(Head):
    """Logits of hidden states through a table's own product.

    Args:
        table: one of :mod:`spectral_fairseq.embeddings`; it may be shared with look-ups.
    """

    def forward(self, features: Tensor) -> Tensor:
        """Logits, shape (*, N), of ``features``, shape (*, d)."""
        return self.table.project(features)

    def loss(
        self,
        features: Tensor,
        targets: Tensor,
        label_smoothing: float = 0.0,
        ignore_index: Optional[int] = None,
    ) -> Tuple[Tensor, Tensor]:
        """As in the base."""
        rows, matrix = self.table.operands(features.flatten(0, -2))
        return blockwise_cross_entropy(
            rows,
            targets.flatten(),
            matrix,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
        )
