"""What every output layer shares: a table, and a loss computed without holding the scores."""

# No "from __future__ import annotations" here: TorchScript reads the annotations.
from typing import Any, Dict, Optional, Tuple

from torch import Tensor, nn


class Head(nn.Module):
    """Base of the output layers.

    Args:
        table: one of :mod:`spectral_fairseq.embeddings`; it may be shared with look-ups.

    Attributes:
        own_loss: whether criterions take :meth:`loss` without being told to.
        own_loss_in_evaluation: whether they do so in validation too, because scores of all words
            for a batch would not fit.
    """

    own_loss = False
    own_loss_in_evaluation = False

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def loss(
        self,
        features: Tensor,
        targets: Tensor,
        label_smoothing: float = 0.0,
        ignore_index: Optional[int] = None,
    ) -> Tuple[Tensor, Tensor]:
        """Label-smoothed cross entropy, with blocks of scores only.

        Args:
            features: shape (*, d_h).
            targets: shape (*).
            label_smoothing: eps, as fairseq's ``label_smoothed_cross_entropy`` spreads it.
            ignore_index: target whose positions count for nothing.

        Returns:
            loss_sum and nll_sum, in nats, float32; only loss_sum has a gradient.
        """
        raise NotImplementedError

    def check_label_smoothing(self, label_smoothing: float) -> None:
        """Refuse what :meth:`loss` cannot smooth with, before training starts."""

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """fairseq's hook: a plain checkpoint keeps the output table as ``weight`` of a Linear.

        The host's decoder also adds that key to checkpoints of ours whose shared table is plain.
        """
        weight = state_dict.pop(f"{name}.weight", None)
        ours = any(key.startswith(f"{name}.table.") for key in state_dict)
        if weight is not None and not ours:
            state_dict[f"{name}.table.weight"] = weight
