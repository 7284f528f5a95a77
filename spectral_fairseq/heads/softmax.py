"""The single softmax, p(y | h) = softmax(W h + b)_y, over a table of any kind."""

# No "from __future__ import annotations" here: TorchScript reads the annotations.
from typing import Any, ClassVar, Optional, Tuple

import torch
from torch import Tensor, nn

from spectral_fairseq.embeddings.table import Table
from spectral_fairseq.functional.adversarial_softmax import adversarial_margin
from spectral_fairseq.functional.blocks import without_ignored
from spectral_fairseq.functional.row_norms import row_norms
from spectral_fairseq.functional.softcap import softcapped
from spectral_fairseq.functional.softmax_loss import Losses, blockwise_cross_entropy
from spectral_fairseq.heads.head import SOFTCAP, Head, HeadSpec
from spectral_fairseq.options import Option


def softmax_loss(
    head: Head, features: Tensor, targets: Tensor, epsilon: float, **options: Any
) -> Losses:
    """The loss of one softmax over a head's table, of features or one mixed context for each token.

    Args:
        head: with a ``bias``, or ``None`` for it.
        features: shape (T, d).
        targets: shape (T,).
        epsilon: of :meth:`Head.loss`.
        **options: of :meth:`Head.loss`, for the function of tensors.
    """
    margin = None
    if epsilon:
        # What is ignored need not be a word of the table.
        ignored = options.pop("ignore_index", None)
        targets, features = without_ignored(ignored, targets, features)
        norms = row_norms(head.table.vectors(targets))
        margin = adversarial_margin(features, norms, epsilon)
    rows, matrix = head.table.operands(features)
    return blockwise_cross_entropy(
        rows, targets, matrix, head.bias, margin=margin, softcap=head.softcap, **options
    )


class SoftmaxHead(Head):
    """Logits of hidden states.

    Args:
        table: W, which look-ups may share.
        bias: give the logits a bias b, shape (N,), zero at the start.
        softcap: c, with which the scores are c tanh((W h + b) / c); ``None`` for none.

    Raises:
        ConfigurationError: c is not above 0.
    """

    kind = "softmax"
    summary = "one softmax"
    options: ClassVar[Tuple[Option, ...]] = (SOFTCAP,)
    adversarial = True
    normalised = True

    def __init__(
        self, table: Table, *, bias: bool = False, softcap: Optional[float] = None
    ) -> None:
        super().__init__(table, softcap)
        start = nn.Parameter(torch.zeros(table.num_embeddings)) if bias else None
        self.register_parameter("bias", start)

    @classmethod
    def build(cls, table: Table, spec: HeadSpec, **options: Any) -> "SoftmaxHead":
        """A new head; the features must be as wide as the table."""
        return cls(table, bias=spec.bias, **options)

    def forward(self, features: Tensor) -> Tensor:
        """Logits, shape (*, N), of ``features``, shape (*, d)."""
        scores = self.table.project(features, self.bias)
        softcap = self.softcap
        return scores if softcap is None else softcapped(scores, softcap)

    def checked_loss(self, features: Tensor, targets: Tensor, **options: Any) -> Losses:
        """Return the loss of one softmax over the table."""
        return softmax_loss(self, features.flatten(0, -2), targets.flatten(), **options)
