"""What is done to a table outside the optimiser, after which steps, and which worker plans it.

The mathematics is that of :mod:`spectral_fairseq.functional.table_control`. After every k-th step

    sigma_i <- sigma_i + eta k s (target_i - sigma_i),     w_j <- w_j - eta' k s mean,

where s is the learning rate as a share of the highest one of its schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import Tensor

from spectral_fairseq.errors import check_range
from spectral_fairseq.functional.table_control import (
    TableChange,
    counted_moments,
    plan_change,
    spectrum_target,
)


@dataclass(frozen=True)
class ControlRule:
    """What is done to a table, and after which steps; the fields are arguments of SpectrumControl.

    Raises:
        ConfigurationError: one of them is outside its range.
    """

    decay: float
    slack: float
    centering: float
    every: int
    start: int
    side: str
    scale: str

    def __post_init__(self) -> None:
        for name in ("decay", "centering"):
            check_range(f"`{name}`", getattr(self, name), at_least=0, at_most=1)
        for name, least in (("every", 1), ("start", 0)):
            check_range(f"`{name}`", getattr(self, name), at_least=least, whole=True)
        flat = torch.ones(1)
        spectrum_target(flat, flat, side=self.side, slack=self.slack, scale=self.scale)

    @property
    def active(self) -> bool:
        """Whether a table is ever changed."""
        return bool(self.decay or self.centering)

    def is_due(self, updates: int) -> bool:
        """Whether a table is to be changed after that many steps."""
        return self.active and updates > self.start and updates % self.every == 0

    def plan(
        self,
        weight: Tensor,
        rate: float,
        *,
        prior: Callable[[Tensor], Tensor],
        excluded: Tensor,
        summed: Callable[[Tensor], Tensor] = lambda part: part,
    ) -> TableChange:
        """The change that is due to a matrix, which is not yet applied.

        Args:
            weight: the table, or the float32 copy that an optimiser trains, shape (N, d).
            rate: s, at most 1.
            prior: returns the singular values that the matrix is moved to, shape (d,).
            excluded: rows that are left alone, shape (m,).
            summed: as of :func:`~spectral_fairseq.functional.table_control.plan_change`.
        """
        return plan_change(
            weight,
            prior(weight),
            min(1.0, self.decay * self.every * rate),
            side=self.side,
            slack=self.slack,
            scale=self.scale,
            centering=min(1.0, self.centering * self.every * rate),
            excluded=excluded,
            summed=summed,
        )


def counted_norm(
    weight: Tensor, excluded: Tensor, summed: Callable[[Tensor], Tensor] = lambda part: part
) -> float:
    """Frobenius norm of the rows that count.

    Args:
        weight: shape (N, d).
        excluded: rows that are not counted, shape (m,).
        summed: the sum of a tensor over the workers, of a table that is split by rows.
    """
    _, gram = counted_moments(weight.detach(), excluded)
    return math.sqrt(float(summed(gram.diagonal().double().sum())))


def from_first_worker(
    compute: Callable[[], Tensor],
    like: Tensor,
    group: Any = None,
    first: int = 0,
    together: bool = False,
) -> Tensor:
    """The first worker's result, on every worker: two eigensolvers need not agree on the last bit.

    Args:
        compute: returns it; called by the first worker only.
        like: of the shape, dtype and device of the result; it is written to.
        group: process group of the workers; ``None`` is all of them.
        first: the rank, among all workers, of the first one of the group.
        together: let every worker compute, since they have to sum; the first one's result counts.
    """
    distributed = torch.distributed
    if not has_workers() or distributed.get_world_size(group) == 1:
        return compute()
    if together or distributed.get_rank() == first:
        like = compute().contiguous()
    distributed.broadcast(like, first, group=group)
    return like


def shared_plan(plan: Callable[[], TableChange], weight: Tensor, **workers: Any) -> TableChange:
    """The first worker's change of a table, on every worker.

    Args:
        plan: returns the change.
        weight: what it is planned for, shape (n, d).
        workers: further arguments of :func:`from_first_worker`.
    """
    dim = weight.size(1)
    like = weight.new_empty((dim + 2, dim), dtype=torch.float64)
    return TableChange.unpacked(from_first_worker(lambda: plan().packed(), like, **workers))


def has_workers() -> bool:
    """Whether this process is one of several that ``torch.distributed`` connects."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
