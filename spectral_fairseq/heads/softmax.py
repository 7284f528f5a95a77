"""The single softmax, p(y | h) = softmax(W h)_y, over a table that may be stored in factors."""

from __future__ import annotations

from typing import Dict

from torch import Tensor, nn

from spectral_fairseq.embeddings.svd import SVDEmbedding


class SoftmaxHead(nn.Module):
    """Logits of hidden states through a table's own product.

    Args:
        table: may be shared with look-ups.
    """

    def __init__(self, table: SVDEmbedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, features: Tensor) -> Tensor:
        """Logits, shape (*, N), of ``features``, shape (*, d)."""
        return self.table.project(features)

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """fairseq's hook: a plain checkpoint keeps the output table as ``weight`` of a Linear."""
        weight = state_dict.pop(f"{name}.weight", None)
        if weight is not None and f"{name}.table.U" not in state_dict:
            state_dict[f"{name}.table.weight"] = weight
