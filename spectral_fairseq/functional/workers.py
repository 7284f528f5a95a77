"""The processes that hold the same table: the first one plans what is done to it, for all."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.functional.table_control import TableChange


class Workers(NamedTuple):
    """The processes that hold the same table, of which the first one plans for all.

    Two eigensolvers need not agree on the last bit. All call :meth:`share` with what they planned.

    Args:
        group: process group of the workers; ``None`` is all of them.
        first: the rank, among all workers, of the first one of the group.
        together: whether every worker plans, since they have to sum; the first one's plan counts.
    """

    group: Any = None
    first: int = 0
    together: bool = False

    @property
    def several(self) -> bool:
        """Whether there is more than one."""
        return has_workers() and torch.distributed.get_world_size(self.group) > 1

    @property
    def plans(self) -> bool:
        """Whether this worker plans."""
        return self.together or not self.several or torch.distributed.get_rank() == self.first

    def share(self, planned: Optional[Tensor], shape: Tuple[int, ...], device: Any) -> Tensor:
        """The first worker's tensor, float64, on every worker.

        Args:
            planned: what this worker planned, shape (*); ``None`` where it does not plan.
            shape: of the tensor.
            device: of the tensor.
        """
        if planned is None:
            planned = torch.empty(shape, dtype=torch.float64, device=device)
        if self.several:
            planned = planned.contiguous()
            torch.distributed.broadcast(planned, self.first, group=self.group)
        return planned

    def share_change(self, planned: Optional[TableChange], weight: Tensor) -> TableChange:
        """The first worker's change of a table of shape (n, d), on every worker."""
        dim = weight.size(1)
        packed = None if planned is None else planned.packed()
        return TableChange.unpacked(self.share(packed, (dim + 2, dim), weight.device))


def has_workers() -> bool:
    """Whether this process is one of several that ``torch.distributed`` connects."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
