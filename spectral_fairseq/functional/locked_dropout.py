"""Dropout with one mask along a dimension, usually time.

Gal and Ghahramani, NeurIPS 2016, https://arxiv.org/abs/1512.05287, call it variational dropout: a
recurrent network sees the same units dropped at every step of a segment, and each sequence of the
batch has a mask of its own.
"""

# No "from __future__ import annotations" here: TorchScript reads the annotations.
import torch
import torch.nn.functional as F
from torch import Tensor


def locked_dropout(features: Tensor, p: float, locked_dim: int, training: bool) -> Tensor:
    """Return ``features`` times one mask, which is the same at every index of ``locked_dim``.

    Args:
        features: any shape.
        p: probability that an entry of the mask is 0; the others are 1 / (1 - p).
        locked_dim: the time axis.
        training: if false, or with p = 0, ``features`` are returned unchanged.
    """
    if not training or p == 0.0:
        return features
    one_step = features.detach().narrow(locked_dim, 0, 1)
    return features * F.dropout(torch.ones_like(one_step), p, True)
