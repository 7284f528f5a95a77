"""Learnable embedding tables: one parameterisation a file."""

from spectral_fairseq.embeddings.svd import SVDEmbedding

__all__ = ["SVDEmbedding"]
