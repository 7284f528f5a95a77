"""The rows of a table on this worker, where ``fully_shard`` (FSDP 2) has split it by rows."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor


class RowShard(NamedTuple):
    """The rows that this worker holds of a table that ``fully_shard`` (FSDP 2) may have split.

    Attributes:
        rows: shape (n, d), in the memory of the parameter; writing to it changes the table.
        start: index of the first one in the whole table.
        group: of the workers that hold the other rows; ``None`` if there are none.
        copies: groups of the workers that hold the same rows (HSDP).
    """

    rows: Tensor
    start: int
    group: Any
    copies: Sequence[Any] = ()

    def own(self, places: Sequence[int]) -> List[int]:
        """Those of the indices of the whole table that are here, counted from ``start``."""
        end = self.start + len(self.rows)
        return [place - self.start for place in places if self.start <= place < end]

    def summed(self, part: Tensor) -> Tensor:
        """The sum of a tensor over the workers."""
        if self.group is None:
            return part
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
    copies = [mesh.get_group(other) for other in range(mesh.ndim) if other != axis]
    return RowShard(rows.detach(), start, mesh.get_group(axis), copies)


def part_of(weight: Tensor, excluded: Sequence[int]) -> Tuple[RowShard, Tensor]:
    """The rows of a table that are here, and those of them that are left alone.

    Args:
        weight: of any kind, shape (N, d).
        excluded: indices of the rows of the whole table that are left alone.

    Returns:
        The part, of n rows, and the indices among these, shape (m,).
    """
    part = row_shard(weight) or RowShard(weight.detach(), 0, None)
    own = part.own(excluded)
    return part, torch.tensor(own, dtype=torch.long, device=part.rows.device)
