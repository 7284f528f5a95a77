"""Counts of target words over the last updates, equal on all workers.

Each micro-batch is counted over all workers when it is met, so that the checkpoint that one worker
writes (hooks/word_counts.py) is complete.
"""

from __future__ import annotations

from typing import Any, Dict, List

import torch
from fairseq.distributed import utils as distributed
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError


class WordMemory:
    """The counts of the last K updates, without the one that is under way.

    Args:
        rows: N, the size of the target dictionary.
        size: K.

    Attributes:
        total: the sum of the counts, on the CPU, shape (N,).
        ignored: set where this worker has run out of batches: it repeats one, whose targets do not
            count.
    """

    def __init__(self, rows: int, size: int) -> None:
        self._rows, self._size = rows, size
        # The words of each update, shape (2, n): indices and counts.
        self._updates: List[Tensor] = []
        self.total = torch.zeros(rows, dtype=torch.long)
        self._pending = torch.zeros(rows, dtype=torch.long)
        self._update = -1
        self.ignored = False

    def __len__(self) -> int:
        return len(self._updates)

    def add(self, targets: Tensor, update: int) -> None:
        """Count the targets of a micro-batch.

        Args:
            targets: indices, of any shape; those of padding may be among them.
            update: number of updates taken before this one. A new number ends the last update.

        Raises:
            ConfigurationError: a target that the dictionary does not have.
        """
        if update != self._update:
            self._end_update()
            self._update = update
        targets = targets[:0] if self.ignored else targets
        counts = torch.bincount(targets.flatten(), minlength=self._rows)
        if len(counts) > self._rows:
            raise ConfigurationError(
                f"one target dictionary, of {self._rows} words, for --gradient-gating",
                f"a target with the index {len(counts) - 1}: the task has several dictionaries",
                "Binarise the data of all languages with one dictionary (--joined-dictionary).",
            )
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            distributed.all_reduce(counts, group=distributed.get_data_parallel_group())
        self._pending += counts.cpu()

    def begin(self, update: int) -> None:
        """Start the batches of an update; those of an attempt that took no step are forgotten.

        Args:
            update: as for :meth:`add`.
        """
        if update == self._update:
            self._pending.zero_()

    def _end_update(self) -> None:
        words = self._pending.nonzero().squeeze(1)
        if len(words):
            self._updates.append(torch.stack([words, self._pending[words]]).int())
            self.total += self._pending
            self._pending.zero_()
        while len(self._updates) > self._size:
            words, counts = self._updates.pop(0).long()
            self.total[words] -= counts

    @property
    def has_counted(self) -> bool:
        """Whether there is anything to save, be it of the update under way."""
        return self._update >= 0

    def state_dict(self) -> Dict[str, Any]:
        """All that a resumed training needs."""
        return {"updates": list(self._updates), "pending": self._pending, "update": self._update}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; counts of another dictionary are ignored."""
        if len(state["pending"]) != self._rows:
            return
        self._updates, self._update = list(state["updates"]), state["update"]
        self._pending = state["pending"].clone()
        self.total = torch.zeros_like(self._pending)
        for words, counts in self._updates:
            self.total[words.long()] += counts
