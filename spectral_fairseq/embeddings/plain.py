"""The plain embedding table: a matrix, as in fairseq."""

# No "from __future__ import annotations" here: TorchScript reads the annotations.
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from spectral_fairseq.embeddings.base import Table, TableSpec, counted_from_start


class PlainEmbedding(nn.Embedding, Table):
    """``nn.Embedding`` that is also the matrix of an output layer, with the same checkpoints.

    Args:
        num_embeddings: N.
        embedding_dim: d.
        padding_idx: row that starts at zero.
        excluded_rows: further rows that penalties and measures leave out.
        init_range: r; the entries start uniformly in [-r, r]. ``None`` draws them from N(0, 1/d),
            which gives rows of norm about 1, as fairseq does.
    """

    kind = "plain"
    summary = "a plain matrix"
    entries = ("weight",)

    padding_idx: int
    init_range: Optional[float] = None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int,
        excluded_rows: Sequence[int] = (),
        *,
        init_range: Optional[float] = None,
    ) -> None:
        row = counted_from_start(padding_idx, num_embeddings)
        super().__init__(num_embeddings, embedding_dim, padding_idx=row)  # draws once
        self._exclude(row, excluded_rows)
        self.init_range = init_range
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the entries anew, as the constructor does."""
        nn.init.normal_(self.weight, mean=0, std=self.embedding_dim**-0.5)
        if self.init_range is not None:
            nn.init.uniform_(self.weight, -self.init_range, self.init_range)
        nn.init.zeros_(self.weight[self.padding_idx])

    @classmethod
    def build(cls, spec: TableSpec, **options: Any) -> "PlainEmbedding":
        """A new table with the architecture's initialisation."""
        return cls(*spec[:4], init_range=spec.init_range, **options)

    def factor(self, weight: Tensor) -> Dict[str, Tensor]:
        """The state dict with which this table equals ``weight``, shape (N, d)."""
        return {"weight": weight.detach()}

    @classmethod
    def dense_rows(cls, entries: Mapping[str, Tensor], rows: Tensor, dtype: torch.dtype) -> Tensor:
        """``rows`` of the stored matrix, shape (n, d)."""
        return entries["weight"][rows].to(dtype)

    def operands(self, features: Tensor) -> Tuple[Tensor, Tensor]:
        """(h, W) of ``features`` h, shape (*, d)."""
        return features, self.weight
