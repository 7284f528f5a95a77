"""Tables that are split by rows over workers, as ``fully_shard`` (FSDP 2) splits them."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence

import torch
from torch import Tensor


class RowShard(NamedTuple):
    """The rows of a table that this worker holds.

    Attributes:
        rows: shape (n, d), in the memory of the parameter; writing to it changes the table.
        start: index of the first one in the whole table.
        group: of the workers that hold the other rows.
    """

    rows: Tensor
    start: int
    group: Any

    def own(self, places: Sequence[int]) -> List[int]:
        """Those of the indices of the whole table that are here, counted from ``start``."""
        end = self.start + len(self.rows)
        return [place - self.start for place in places if self.start <= place < end]

    def summed(self, part: Tensor) -> Tensor:
        """The sum of a tensor over the workers."""
        total = part.contiguous().clone()
        torch.distributed.all_reduce(total, group=self.group)
        return total


@torch.no_grad()
def row_shard(weight: Tensor) -> Optional[RowShard]:
    """The part of a table on this worker; ``None`` if it is not split by rows alone.

    A table that is also copied to other groups of workers (HSDP) is split in the same way in each.

    Args:
        weight: of any kind, shape (N, d).
    """
    if not any(kind.__name__ == "DTensor" for kind in type(weight).__mro__):
        return None
    table: Any = weight
    split = [
        (axis, place) for axis, place in enumerate(table.placements) if not place.is_replicate()
    ]
    if len(split) != 1 or type(split[0][1]).__name__ != "Shard" or split[0][1].dim != 0:
        return None
    axis, mesh = split[0][0], table.device_mesh
    chunk = -(-table.size(0) // mesh.size(axis))
    start = min(mesh.get_local_rank(axis) * chunk, table.size(0))
    rows = table.to_local()
    if len(rows) != min(chunk, table.size(0) - start):  # not in equal pieces, the last one smaller
        return None
    return RowShard(rows.detach(), start, mesh.get_group(axis))
