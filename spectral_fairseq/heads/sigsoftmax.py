"""The sigsoftmax over a table of any kind: a softmax whose log-probabilities have any rank.

Kanai et al., NeurIPS 2018, https://arxiv.org/abs/1805.10829
"""

# No "from __future__ import annotations" here: TorchScript reads the annotations.
from torch import Tensor

from spectral_fairseq.functional.softmax_loss import sigsoftmax_cross_entropy, sigsoftmax_scores
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
    cross_entropy = staticmethod(sigsoftmax_cross_entropy)
    own_loss = True  # so that no loss for linear scores is taken

    def forward(self, features: Tensor) -> Tensor:
        """Scores, shape (*, N), of ``features``, shape (*, d)."""
        return sigsoftmax_scores(self.table.project(features, self.bias))
