"""The sigsoftmax over a table of any kind: a softmax whose log-probabilities have any rank.

Kanai et al., NeurIPS 2018, https://arxiv.org/abs/1805.10829
"""

# No "from __future__ import annotations" here: TorchScript reads the annotations.
from typing import Optional, Tuple

from torch import Tensor

from spectral_fairseq.functional.losses.sigsoftmax import (
    sigsoftmax_cross_entropy,
    sigsoftmax_scores,
)
from spectral_fairseq.heads.softmax import SoftmaxHead


class SigSoftmaxHead(SoftmaxHead):
    """Scores z + log sigmoid(z) of the logits z = W h + b; their softmax is the sigsoftmax.

    Args:
        table: W, which look-ups may share.
        bias: give the logits a bias b, shape (N,), zero at the start.
    """

    kind = "sigsoftmax"
    summary = "one sigsoftmax"
    adversarial = False
    own_loss = True  # the losses of a linear layer's scores do not hold for these

    def forward(self, features: Tensor) -> Tensor:
        """Scores, shape (*, N), of ``features``, shape (*, d)."""
        return sigsoftmax_scores(self.table.project(features, self.bias))

    def loss(
        self,
        features: Tensor,
        targets: Tensor,
        label_smoothing: float = 0.0,
        ignore_index: Optional[int] = None,
    ) -> Tuple[Tensor, Tensor]:
        """Label-smoothed cross entropy; see :meth:`Head.loss`."""
        rows, matrix = self.table.operands(features.flatten(0, -2))
        return sigsoftmax_cross_entropy(
            rows,
            targets.flatten(),
            matrix,
            self.bias,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
        )
