"""The single softmax, p(y | h) = softmax(W h + b)_y, over a table that may be stored in factors."""

# No "from __future__ import annotations" here: TorchScript reads the annotations.
from typing import Any, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectral_fairseq.functional.losses.blockwise import blockwise_cross_entropy
from spectral_fairseq.heads.base import Head


class SoftmaxHead(Head):
    """Logits of hidden states through a table's own product.

    Args:
        table: one of :mod:`spectral_fairseq.embeddings`; it may be shared with look-ups.
        bias: give the logits a bias b, shape (N,), zero at the start.
    """

    bias: Optional[Tensor]

    def __init__(self, table: Any, *, bias: bool = False) -> None:
        super().__init__(table)
        if bias:
            self.bias = nn.Parameter(torch.zeros(table.num_embeddings))
        else:
            self.register_parameter("bias", None)

    def forward(self, features: Tensor) -> Tensor:
        """Logits, shape (*, N), of ``features``, shape (*, d)."""
        rows, matrix = self.table.operands(features)
        return F.linear(rows, matrix, self.bias)

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
            self.bias,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
        )
