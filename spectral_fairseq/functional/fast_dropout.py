"""Dropout on a CPU with masks that are drawn fast.

Flags: ``--fast-dropout`` off.
In order: ``plugin/dropout.py: draw_masks_fast``, ``plugin/dropout.py: FastDropout``,
    ``fast_dropout``.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor


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
