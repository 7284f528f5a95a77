"""Dropout whose mask holds along one dimension.

Gal and Ghahramani, NeurIPS 2016, call it variational: a recurrent network sees the same units
dropped at every step of a segment, each sequence of the batch with a mask of its own.
"""

# No "from __future__ import annotations" here: TorchScript reads the annotations.
import torch
import torch.nn.functional as F
from torch import Tensor


def locked_dropout(features: Tensor, p: float, locked_dim: int, training: bool) -> Tensor:
    """``features`` times one mask, the same at every index of ``locked_dim``.

    Args:
        features: any shape.
        p: probability that an entry of the mask is 0; the others are 1 / (1 - p).
        locked_dim: the time axis.
        training: otherwise, or with p = 0, ``features`` come back as they are.
    """
    if not training or p == 0.0:
        return features
    one_step = features.detach().narrow(locked_dim, 0, 1)
    return features * F.dropout(torch.ones_like(one_step), p, True)
