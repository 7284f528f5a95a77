"""Learnable embedding tables, one kind in each file.

A new kind is a subclass of :class:`Table` in a file of its own and an entry of :data:`TABLES`.
"""

from typing import Tuple, Type

from spectral_fairseq.embeddings.spectral_norm import SpectralNormEmbedding
from spectral_fairseq.embeddings.svd import SVDEmbedding
from spectral_fairseq.embeddings.table import (
    FactoredEmbedding,
    FactorMeasures,
    PlainEmbedding,
    Table,
    TableSpec,
)
from spectral_fairseq.embeddings.weight_norm import WeightNormEmbedding

TABLES: Tuple[Type[Table], ...] = (
    PlainEmbedding,
    SVDEmbedding,
    WeightNormEmbedding,
    SpectralNormEmbedding,
)
"""Every kind of table, in the order in which users see them."""

__all__ = [
    "TABLES",
    "FactorMeasures",
    "FactoredEmbedding",
    "PlainEmbedding",
    "SVDEmbedding",
    "SpectralNormEmbedding",
    "Table",
    "TableSpec",
    "WeightNormEmbedding",
]
