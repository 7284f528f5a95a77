"""Dropout: with one mask along a dimension, of whole words, and with masks that are drawn fast.

Flags: ``--fast-dropout`` off.
In order: ``plugin/cpu.py: draw_masks_fast``, ``plugin/cpu.py: FastDropout``, ``fast_dropout``.
"""

from functools import cache
from typing import Any, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

# No "from __future__ import annotations" here: TorchScript reads the annotations.


# Dropout with one mask along a dimension, usually time.
#
# Gal and Ghahramani, NeurIPS 2016, https://arxiv.org/abs/1512.05287, call it variational dropout: a
# recurrent network sees the same units dropped at every step of a segment, and each sequence of the
# batch has a mask of its own.


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


# Dropout of whole words from the look-up: section 4.2 of the same paper.


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


def _scaled_product(features: Tensor, kept: Tensor, scale: float) -> Tensor:
    """Return features * kept * scale, in one pass, which converts the mask on the way."""
    if not _addcmul_converts():
        kept = kept.to(features.dtype)
    return torch.addcmul(features.new_zeros(()), features, kept, value=scale)


@cache
def _addcmul_converts() -> bool:
    """Whether this torch multiplies tensors of different types there; 1.12 does not."""
    try:
        torch.addcmul(torch.zeros(()), torch.ones(()), torch.ones((), dtype=torch.int8))
    except RuntimeError:
        return False
    return True


class _FastDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, levels: int) -> Tensor:
        count = features.numel()
        bits = torch.empty(count // 4 + 1, dtype=torch.int64).random_(-(2**63), None)
        lanes = bits.view(torch.int16)[:count].view(features.shape)
        # As int8, which a CPU converts to the dtype of the features four times as fast as bool.
        kept = torch.empty_like(lanes, dtype=torch.int8)
        torch.ge(lanes, levels - 2**15, out=kept)
        ctx.scale = 2**16 / (2**16 - levels)
        ctx.save_for_backward(kept)
        return _scaled_product(features, kept, ctx.scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return _scaled_product(gradients[0], kept, ctx.scale), None


def fast_dropout(features: Tensor, p: float) -> Tensor:
    """Dropout of the entries of a tensor on a CPU, with another mask than torch's.

    torch draws a number for each entry, on one thread. Here 64 random bits serve four entries, so
    p is rounded to a multiple of 1 / 65,536, and the scale of what is kept follows from that p. The
    mask takes one byte an entry, where torch keeps a factor in the dtype of the features.

    Args:
        features: any shape; on a CPU.
        p: probability of an entry to become 0; the others are divided by 1 - p.
    """
    levels = round(p * 2**16)
    if not 0 < levels < 2**16:
        return F.dropout(features, p)
    return _FastDropout.apply(features, levels)
