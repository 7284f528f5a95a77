"""From hidden states to the vocabulary: one output layer a file."""

from spectral_fairseq.heads.softmax import SoftmaxHead

__all__ = ["SoftmaxHead"]
