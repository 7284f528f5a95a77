"""The z-loss and the soft cap, two ways to keep the scores of a softmax small.

With scores x, their normaliser log Z = logsumexp(x), and a target y, a token costs

    -log p_y + lambda (log Z)^2,        gradient for x:  (1 + 2 lambda log Z) p - y

with the z-loss of Chowdhery et al., "PaLM", 2022, https://arxiv.org/abs/2204.02311, section 5,
whose lambda is 1e-4. With the soft cap c of Gemma 2, https://arxiv.org/abs/2408.00118, section 2,
whose c is 30, the scores are

    s = c tanh(x / c),        ds/dx = 1 - (s / c)^2.

The z-loss changes the training alone. A soft cap is a part of the model, which has other
probabilities without it. The loss by blocks that takes both is
:func:`~.softmax_loss.blockwise_cross_entropy`.

Flags: ``--z-loss`` 0, ``--logit-softcap``.
In order: ``heads/head.py: SoftmaxHead.loss``, ``functional/softmax_loss.py:
    blockwise_cross_entropy``, ``softcap_``.
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
