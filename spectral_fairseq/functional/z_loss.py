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
"""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError


def check_z_loss(z_loss: float) -> None:
    """Refuse a weight outside its range.

    Raises:
        ConfigurationError: lambda is negative, infinite or not a number.
    """
    if not 0 <= z_loss < math.inf:
        raise ConfigurationError("`z_loss` to be a finite number >= 0", repr(z_loss), "Correct it.")


def check_softcap(softcap: Optional[float]) -> None:
    """Refuse a cap outside its range.

    Raises:
        ConfigurationError: c is not a finite number above 0.
    """
    if softcap is not None and not 0 < softcap < math.inf:
        raise ConfigurationError(
            "`softcap` to be a finite number > 0", repr(softcap), "Correct it, or leave it out."
        )


def softcapped(scores: Tensor, softcap: float) -> Tensor:
    """Return c tanh(x / c) of scores x of any shape."""
    return softcap * torch.tanh(scores / softcap)


def softcap_(scores: Tensor, softcap: float) -> Tensor:
    """Overwrite scores x, of any shape, by s = c tanh(x / c), and return ds/dx of that shape."""
    scores.div_(softcap).tanh_()
    slope = scores.square().neg_().add_(1.0)
    scores.mul_(softcap)
    return slope
