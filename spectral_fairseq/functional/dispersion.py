"""Dispersion of the hidden states of a sequence, and the condensation that it works against.

Liu et al.: "Dispersion loss counteracts embedding condensation and improves generalization in small
language models", ICML 2026, https://arxiv.org/abs/2602.00217. From layer to layer the states z_i of
one sequence point more and more the same way; the smaller the model, the more. The measure is their
mean cosine within a sequence. The loss with which the paper does best is the angular one,

    R = log mean_{i != j} exp(-D_ij / tau),     D_ij = arccos(cos(z_i, z_j)) / pi

of one sequence and one layer, from -1/tau for opposite states to 0 for aligned ones. It is averaged
over the layers and over the sequences, each of which counts by its positions: so a batch may be cut
in any way, and for sequences of one length, as in the paper, it is the plain mean.

Flags: ``--dispersion-weight`` 0.
In order: ``plugin/penalties.py: layer_states``, ``dispersion_penalty``.

Note [The slope of the angle]
-----------------------------
The slope of arccos is infinite at 1, where the states begin. As in the paper's code, cosines are
clamped to [-.75, .75], and the gradient passes through: a pair beyond is pushed apart with the
slope at the bound. Lengths enter as ||z|| + .01, which keeps the gradient of short states small.
"""

from __future__ import annotations

import math
from typing import Any, Optional, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.functional.products import differentiable_once, unit_rows

LARGEST_COSINE = 0.75
_ADDED_TO_NORMS = 0.01


class _Closeness(torch.autograd.Function):
    """exp(-arccos(c) / (pi tau)) of cosines c; see Note [The slope of the angle].

    It keeps its own result and nothing else of the size of all pairs.
    """

    @staticmethod
    def forward(ctx: Any, cosines: Tensor, tau: float) -> Tensor:
        ctx.rate = 1 / (math.pi * tau)
        clamped = cosines.clamp(-LARGEST_COSINE, LARGEST_COSINE)
        close = clamped.acos_().mul_(-ctx.rate).exp_()
        ctx.save_for_backward(close)
        return close

    @staticmethod
    @differentiable_once("dispersion_penalty")
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        (close,) = ctx.saved_tensors
        sine = close.log().div_(-ctx.rate).sin_()  # of the angle
        return sine.reciprocal_().mul_(close).mul_(grad).mul_(ctx.rate), None


def dispersion_penalty(
    layers: Sequence[Tensor],
    counted: Tensor,
    *,
    tau: float = 1.0,
    positions: int = 256,
) -> Tensor:
    """Return R, in time O(T^2 d) for each layer and sequence.

    Args:
        layers: z of each layer, shape (B, T, d), of any floating dtype.
        counted: shape (B, T), false at padding, whose states neither count nor get a gradient.
        tau: temperature, > 0.
        positions: states of a sequence that are compared at most; of a longer one as many are
            drawn at random, the same ones in all layers.

    Returns:
        Scalar between -1/tau and 0, in float32 or wider. A sequence of one state has R = 0, and so
        has a batch of which no layer is given.
    """
    if not layers:
        return torch.zeros((), device=counted.device)
    shares = counted.sum(1)  # [B]
    if counted.size(1) > positions:
        order = torch.rand(counted.shape, device=counted.device).masked_fill_(~counted, -1)
        drawn = order.topk(positions, dim=1).indices.unsqueeze(-1)  # [B, t, 1]
        layers = [layer.take_along_dim(drawn, 1) for layer in layers]
        counted = counted.gather(1, drawn.squeeze(-1))
    count = counted.sum(1)
    pairs = counted.unsqueeze(1) & counted.unsqueeze(2)  # [B, t, t]
    pairs.diagonal(dim1=1, dim2=2).fill_(False)
    total = torch.stack([_log_closeness(layer, counted, pairs, count, tau) for layer in layers])
    return (total.mean(0) * shares).sum() / shares.sum().clamp(min=1)


def _log_closeness(
    states: Tensor, counted: Tensor, pairs: Tensor, count: Tensor, tau: float
) -> Tensor:
    """R of each sequence, shape (B,)."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    wide = wide.masked_fill(~counted.unsqueeze(-1), 0)
    units = wide / (torch.linalg.vector_norm(wide, dim=-1, keepdim=True) + _ADDED_TO_NORMS)
    close = _Closeness.apply(units @ units.transpose(1, 2), tau)
    several = count > 1
    total = (close * pairs).sum((1, 2)) + (~several)  # log 1 = 0 of a sequence without pairs
    return total.log() - (count * (count - 1)).clamp(min=1).to(total).log()


class SequenceCosine:
    """The mean cosine of different states of a sequence, averaged over sequences.

    It is what the paper measures in each layer, without the cosines of states with themselves. The
    sequences come one after the other, in blocks that are cut anywhere.
    """

    def __init__(self) -> None:
        self._sequence = -1
        self._sum: Optional[Tensor] = None
        self._count = self._with_direction = self._sequences = 0
        self._total = 0.0

    def add(self, states: Tensor, sequences: Tensor) -> None:
        """Add states.

        Args:
            states: shape (b, d); the cosines of a zero state are 0.
            sequences: the number of the sequence of each, >= 0 and rising, shape (b,).
        """
        units = unit_rows(states.detach().double()).cpu()
        numbers, sizes = sequences.cpu().unique_consecutive(return_counts=True)
        for number, part in zip(numbers.tolist(), units.split(sizes.tolist())):
            if number != self._sequence:
                self._close()
                self._sequence, self._sum = number, torch.zeros_like(part[0])
            self._sum += part.sum(0)
            self._count += len(part)
            self._with_direction += int(part.any(1).sum())

    def _close(self) -> None:
        if self._sum is not None and self._count > 1:
            pairs = self._count * (self._count - 1)
            self._total += (float(self._sum.square().sum()) - self._with_direction) / pairs
            self._sequences += 1
        self._sequence, self._sum, self._count, self._with_direction = -1, None, 0, 0

    def value(self) -> Optional[float]:
        """The mean over the sequences of two states or more; ``None`` if there are none."""
        self._close()
        return self._total / self._sequences if self._sequences else None
