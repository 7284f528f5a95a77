"""Learnable embedding tables: one parameterisation a file."""

from spectral_fairseq.embeddings.plain import PlainEmbedding
from spectral_fairseq.embeddings.svd import SVDEmbedding
from spectral_fairseq.embeddings.weight_norm import WeightNormEmbedding

__all__ = ["PlainEmbedding", "SVDEmbedding", "WeightNormEmbedding"]
