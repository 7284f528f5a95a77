"""Dropout of whole words from the look-up.

Gal and Ghahramani, NeurIPS 2016, https://arxiv.org/abs/1512.05287, section 4.2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
