"""The soft cap, which keeps the scores of a softmax between -c and c.

With scores x and the cap c of Gemma 2, https://arxiv.org/abs/2408.00118, section 2, whose c is 30,

    s = c tanh(x / c),        ds/dx = 1 - (s / c)^2.

A soft cap is a part of the model, which has other probabilities without it.

Flags: ``--logit-softcap``.
In order: ``heads/head.py: Head.loss``, ``functional/block_softmaxes.py: BlockSoftmaxes``,
    ``softcap_``; ``softcapped`` in evaluation and search.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softcapped(scores: Tensor, softcap: float) -> Tensor:
    """Return c tanh(x / c) of scores x of any shape."""
    return softcap * torch.tanh(scores / softcap)


def softcap_(scores: Tensor, softcap: float) -> Tensor:
    """Overwrite scores x, of any shape, by s = c tanh(x / c), and return ds/dx of that shape."""
    scores.div_(softcap).tanh_()
    slope = scores.square().neg_().add_(1.0)
    scores.mul_(softcap)
    return slope
