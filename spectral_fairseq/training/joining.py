"""Tensors that ``fully_shard`` has split over workers, put together, and the matrix of a table.

Every worker has to call these functions, in the same order; the first one gets the result.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, cast

import torch
from torch import Tensor, nn

from spectral_fairseq.embeddings.table import FactoredEmbedding
from spectral_fairseq.functional.workers import has_workers


def is_split(model: nn.Module) -> bool:
    """Whether workers hold parts of a model's parameters."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def added_over_workers(sums: Tensor) -> Tensor:
    """The sum of a tensor over all workers, on each of them."""
    if has_workers():
        torch.distributed.all_reduce(sums)
    return sums


def joined(tensor: Tensor) -> Tensor:
    """A tensor with the parts of all workers, on each of them."""
    whole: Any = getattr(tensor, "full_tensor", None)
    return tensor.detach() if whole is None else whole().detach()


def joined_state(model: nn.Module) -> Dict[str, Tensor]:
    """The state dict of a model with whole tensors in the memory of the CPU.

    One tensor is put together at a time.

    Returns:
        On the first worker all entries, on the others none.
    """
    is_first = not has_workers() or torch.distributed.get_rank() == 0
    state: Dict[str, Any] = {}
    kept: Dict[int, Any] = {}  # tied layers have one entry
    for name, entry in model.state_dict(keep_vars=True).items():
        if isinstance(entry, Tensor) and id(entry) not in kept:
            whole = joined(entry)
            kept[id(entry)] = whole.cpu() if is_first else None
        state[name] = kept.get(id(entry), entry)
    return state if is_first else {}


@torch.no_grad()
def dense_from(table: FactoredEmbedding, entries: Mapping[str, Tensor]) -> Tensor:
    """The matrix that a table would have with other entries, such as those put together.

    Args:
        table: which is not changed.
        entries: by the names of its own state dict.

    Returns:
        Shape (N, d), bit for bit what ``table.dense()`` gives in one process.
    """
    other = cast(FactoredEmbedding, object.__new__(type(table)))
    given = {name: entries[name] for name in table._parameters}
    where = next(iter(given.values())).device
    # Buffers that no state dict has are where the table is.
    kept = {
        name: buffer if buffer is None else entries.get(name, buffer).to(where)
        for name, buffer in table._buffers.items()
    }
    other.__dict__ = {**table.__dict__, "_parameters": given, "_buffers": kept}
    return other.dense().clone()
