"""Random rows that depend on the seed alone."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_rows(count: int, wanted: int, seed: int) -> Tensor:
    """``wanted`` of ``count`` rows, uniformly, without repetition, in ascending order.

    All of them where ``wanted`` is not smaller.
    """
    if wanted >= count:
        return torch.arange(count)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=generator)[:wanted].sort().values
