"""The single softmax, p(y | h) = softmax(W h + b)_y, over a table of any kind."""

# No "from __future__ import annotations" here: TorchScript reads the annotations.
from typing import Any, Optional, Tuple

import torch
from torch import Tensor, nn

from spectral_fairseq.embeddings.base import Table
from spectral_fairseq.functional.products import row_norms
from spectral_fairseq.functional.softmax_loss import (
    AdversarialLoss,
    adversarial_blockwise_cross_entropy,
    adversarial_margin,
    blockwise_cross_entropy,
)
from spectral_fairseq.heads.base import Head, HeadSpec


class SoftmaxHead(Head):
    """Logits of hidden states.

    Args:
        table: W, which look-ups may share.
        bias: give the logits a bias b, shape (N,), zero at the start.
    """

    kind = "softmax"
    summary = "one softmax"
    adversarial = True

    cross_entropy = staticmethod(blockwise_cross_entropy)

    bias: Optional[Tensor]

    def __init__(self, table: Table, *, bias: bool = False) -> None:
        super().__init__(table)
        if bias:
            self.bias = nn.Parameter(torch.zeros(table.num_embeddings))
        else:
            self.register_parameter("bias", None)

    @classmethod
    def build(cls, table: Table, spec: HeadSpec, **options: Any) -> "SoftmaxHead":
        """A new head; the features must be as wide as the table."""
        return cls(table, bias=spec.bias, **options)

    def forward(self, features: Tensor) -> Tensor:
        """Logits, shape (*, N), of ``features``, shape (*, d)."""
        return self.table.project(features, self.bias)

    def loss(
        self,
        features: Tensor,
        targets: Tensor,
        label_smoothing: float = 0.0,
        ignore_index: Optional[int] = None,
    ) -> Tuple[Tensor, Tensor]:
        """Label-smoothed cross entropy; see :meth:`Head.loss`."""
        rows, matrix = self.table.operands(features.flatten(0, -2))
        return self.cross_entropy(
            rows,
            targets.flatten(),
            matrix,
            self.bias,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
        )

    def adversarial_loss(
        self,
        features: Tensor,
        targets: Tensor,
        epsilon: float,
        label_smoothing: float = 0.0,
        ignore_index: Optional[int] = None,
    ) -> AdversarialLoss:
        """The loss with the target's logit lowered; see :meth:`Head.adversarial_loss`."""
        features, targets = features.flatten(0, -2), targets.flatten()
        norms = row_norms(self.table.vectors(targets))
        rows, matrix = self.table.operands(features)
        return adversarial_blockwise_cross_entropy(
            rows,
            targets,
            matrix,
            adversarial_margin(features, norms, targets, epsilon),
            self.bias,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
        )
