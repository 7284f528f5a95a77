"""The single softmax, p(y | h) = softmax(W h + b)_y, over a table of any kind."""

# No "from __future__ import annotations" here: TorchScript reads the annotations.
from typing import Any, ClassVar, Optional, Tuple

import torch
from torch import Tensor, nn

from spectral_fairseq.embeddings.table import Table
from spectral_fairseq.functional.softmax_loss import Losses, softcapped
from spectral_fairseq.heads.head import SOFTCAP, Head, HeadSpec
from spectral_fairseq.options import Option


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
        return self.softmax_loss(features.flatten(0, -2), targets.flatten(), **options)
