"""Output layers from hidden states to the vocabulary, one kind in each file.

A head maps features to scores (``forward``) and, in training, features and targets to their
summed loss without holding the scores (``loss``). A new kind is a subclass of :class:`Head` in a
file of its own and an entry of :data:`HEADS`.
"""

from typing import Tuple, Type

from spectral_fairseq.heads.adaptive import AdaptiveSoftmaxHead
from spectral_fairseq.heads.head import Head, HeadSpec
from spectral_fairseq.heads.mixture import MixtureOfContexts, MixtureOfSoftmaxes
from spectral_fairseq.heads.softmax import SoftmaxHead

HEADS: Tuple[Type[Head], ...] = (
    SoftmaxHead,
    MixtureOfSoftmaxes,
    MixtureOfContexts,
)
"""The heads that every architecture offers, in the order in which users see them.

:class:`AdaptiveSoftmaxHead` is not among them: it is the softmax of architectures that declare its
options.
"""

__all__ = [
    "HEADS",
    "AdaptiveSoftmaxHead",
    "Head",
    "HeadSpec",
    "MixtureOfContexts",
    "MixtureOfSoftmaxes",
    "SoftmaxHead",
]
