"""The dropouts of AWD-LSTM: with one mask along a dimension, usually time, and of whole words.

Gal and Ghahramani, NeurIPS 2016, https://arxiv.org/abs/1512.05287, call the first one variational
dropout: a recurrent network sees the same units dropped at every step of a segment, and each
sequence of the batch has a mask of its own. The second is in section 4.2 of the same paper.
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
        training: if false, with p = 0, or without any step of time, ``features`` are returned
            unchanged.
    """
    if not training or p == 0.0 or features.size(locked_dim) == 0:
        return features
    one_step = features.detach().narrow(locked_dim, 0, 1)
    return features * F.dropout(torch.ones_like(one_step), p, True)


def word_dropout(
    embedded: Tensor, tokens: Tensor, num_embeddings: int, p: float, training: bool
) -> Tensor:
    """Drop word types: the vectors of every occurrence of a dropped word become zero.

    This equals masking the rows of the table, by a mask of shape (N, 1) divided by 1 - p, before
    the look-up, but the table itself, which an output layer may share, stays unmasked.

    Args:
        embedded: shape (*tokens.shape, d).
        tokens: indices below N.
        num_embeddings: N.
        p: probability of each word type to be dropped; the others are scaled by 1 / (1 - p).
        training: if false, or with p = 0, ``embedded`` is returned unchanged.
    """
    if not training or p == 0.0:
        return embedded
    kept = F.dropout(torch.ones(num_embeddings, dtype=embedded.dtype, device=embedded.device), p)
    return embedded * kept[tokens].unsqueeze(-1)
