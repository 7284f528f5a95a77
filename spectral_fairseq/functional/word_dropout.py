"""Dropout of whole words from the look-up: Gal and Ghahramani, NeurIPS 2016, section 4.2."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def word_dropout(
    embedded: Tensor, tokens: Tensor, num_embeddings: int, p: float, training: bool
) -> Tensor:
    """Drop word types: every occurrence of a dropped word in ``tokens`` becomes zero.

    Equal to masking the rows of the table, by a mask of shape (N, 1) over 1 - p, before the
    look-up; the table that an output layer shares stays unmasked.

    Args:
        embedded: shape (*tokens.shape, d).
        tokens: indices below N.
        num_embeddings: N.
        p: probability of each word type to be dropped; the others are scaled by 1 / (1 - p).
        training: otherwise, or with p = 0, ``embedded`` comes back as it is.
    """
    if not training or p == 0.0:
        return embedded
    kept = F.dropout(torch.ones(num_embeddings, dtype=embedded.dtype, device=embedded.device), p)
    return embedded * kept[tokens].unsqueeze(-1)
