"""Counts of target words over the last updates, equal on all workers and kept in checkpoints.

Note [Where a criterion keeps its state]
----------------------------------------
fairseq saves the state of a criterion only if it has parameters, but the state of the task always,
and all workers load it. The counts are therefore part of ``task.state``. Each micro-batch is
counted over all workers when it is met, so that the file that one worker writes is complete.
"""

from __future__ import annotations

from typing import Any, Dict

import torch
from fairseq.distributed import utils as distributed
from torch import Tensor

KEY = "gradient_gating"


class WordMemory:
    """The counts of the last K updates, without the one that is under way.

    Args:
        task: fairseq's; it may lack a ``state``, and checkpoints then lack the counts.
        rows: N, the size of the target dictionary.
        size: K.
    """

    def __init__(self, task: Any, rows: int, size: int) -> None:
        self._task, self._rows, self._size = task, rows, size
        self._own: Dict[str, Any] = {}

    def _state(self) -> Dict[str, Any]:
        container = getattr(self._task, "state", None)
        saved = self._own if container is None else container.state_dict
        if KEY not in saved or len(saved[KEY]["total"]) != self._rows:  # of another dictionary
            # "updates" has the words of each update, shape (2, n): indices and counts.
            zeros = torch.zeros(self._rows, dtype=torch.long)
            saved[KEY] = {"updates": [], "total": zeros, "pending": zeros.clone(), "update": -1}
        state: Dict[str, Any] = saved[KEY]
        return state

    def add(self, targets: Tensor, update: int) -> None:
        """Count the targets of a micro-batch.

        Args:
            targets: indices, of any shape; those of padding may be among them.
            update: number of updates taken before this one. A new number ends the last update.
        """
        state = self._state()
        if update != state["update"]:
            self._end_update(state)
            state["update"] = update
        counts = torch.bincount(targets.flatten(), minlength=self._rows)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            distributed.all_reduce(counts, group=distributed.get_data_parallel_group())
        state["pending"] += counts.cpu()

    def _end_update(self, state: Dict[str, Any]) -> None:
        pending = state["pending"]
        words = pending.nonzero().squeeze(1)
        if len(words):
            state["updates"].append(torch.stack([words, pending[words]]).int())
            state["total"] += pending
            pending.zero_()
        while len(state["updates"]) > self._size:
            words, counts = state["updates"].pop(0).long()
            state["total"][words] -= counts

    @property
    def total(self) -> Tensor:
        """The sum of the counts, on the CPU, shape (N,)."""
        total: Tensor = self._state()["total"]
        return total

    def __len__(self) -> int:
        return len(self._state()["updates"])
