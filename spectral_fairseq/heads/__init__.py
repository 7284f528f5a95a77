"""From hidden states to the vocabulary: one output layer a file.

Each head maps features to scores (``forward``) and, in training, features and targets to their
summed loss without holding the scores (``loss``).
"""

from spectral_fairseq.heads.adaptive import AdaptiveSoftmaxHead
from spectral_fairseq.heads.mixture import MixtureOfContexts, MixtureOfSoftmaxes
from spectral_fairseq.heads.softmax import SoftmaxHead

__all__ = ["AdaptiveSoftmaxHead", "MixtureOfContexts", "MixtureOfSoftmaxes", "SoftmaxHead"]
