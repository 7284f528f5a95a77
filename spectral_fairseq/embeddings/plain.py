"""The plain table, with the interface that the parameterised ones have."""

from typing import Tuple

import torch.nn.functional as F
from torch import Tensor, nn


class PlainEmbedding(nn.Embedding):
    """``nn.Embedding`` that is also an output layer; its checkpoints are those of a plain one.

    Args:
        num_embeddings: N.
        embedding_dim: d.
        padding_idx: row that starts at zero.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx=padding_idx)
        # fairseq's initialisation: rows of norm about 1.
        nn.init.normal_(self.weight, mean=0, std=embedding_dim**-0.5)
        nn.init.zeros_(self.weight[padding_idx])

    def operands(self, features: Tensor) -> Tuple[Tensor, Tensor]:
        """(h, W) of ``features`` h, shape (*, d): what a loss multiplies, block by block."""
        return features, self.weight

    def project(self, features: Tensor) -> Tensor:
        """Logits W h of ``features`` h, shape (*, d): shape (*, N)."""
        return F.linear(features, self.weight)
