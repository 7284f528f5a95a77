"""The likelihood with gated gradients of rare words' output vectors: Yu et al., ACL 2022.

"Rare Tokens Degenerate All Tokens", https://arxiv.org/abs/2109.03127. The loss is that of
``label_smoothed_cross_entropy``; only the gradient of the output table W changes, and with it those
of the factors of which W is made.
"""

from __future__ import annotations

from typing import Any, Dict, List

import torch
from fairseq.distributed import utils as distributed
from torch import Tensor, nn

from spectral_fairseq import refusals
from spectral_fairseq.functional.gradients import Gates, gated_scores, gates_of_counts
from spectral_fairseq.functional.table_control import has_workers
from spectral_fairseq.plugin.find import check_output_layer, check_trained, softmax_operands
from spectral_fairseq.plugin.likelihood import GRADIENT_GATING, FullScores, Likelihood
from spectral_fairseq.plugin.objective import Parts

# Counts of target words over the last updates, equal on all workers.
#
# Each micro-batch is counted over all workers when it is met, so that the checkpoint that one
# worker writes is complete.


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
            raise refusals.SEVERAL_DICTIONARIES.error(
                f"a target with the index {len(counts) - 1} beside a dictionary of {self._rows} "
                "words: the task has several",
                GRADIENT_GATING.flag,
            )
        if has_workers():
            distributed.all_reduce(counts, group=distributed.get_data_parallel_group())
        self._pending += counts.cpu()

    def begin(self, update: int) -> None:
        """Start the batches of an update; those of an attempt that took no step are forgotten."""
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


class GradientGating(FullScores):
    """The plain likelihood, computed from scores whose table receives gated gradients.

    Args:
        criterion: has the ``word_memory``, which lives as long as it does.
        alpha: words that occur less often than this in an update are rare.

    Raises:
        ConfigurationError: an output layer that is not a single softmax.
    """

    flag = GRADIENT_GATING.flag
    makes_scores = True

    def __init__(self, criterion: Any, parts: Parts, alpha: float) -> None:
        super().__init__(criterion, parts)
        self.alpha = alpha
        if self.own_loss:
            capped = getattr(self.head, "softcap", None) is not None
            raise refusals.GATING.error("--logit-softcap" if capped else type(self.head).__name__)

    def check(self) -> None:
        """See the base class."""
        check_output_layer(self.decoder)
        check_trained(self.decoder, self.words.rows, GRADIENT_GATING.flag)

    def __call__(self, model: nn.Module, sample: Any, reduce: bool) -> Likelihood:
        """See the base class."""
        target = sample["target"]
        memory: WordMemory = self.criterion.word_memory
        counted = target[target.ne(self.criterion.padding_idx)]
        memory.add(counted, self.criterion.num_updates)
        gates = self._gates(memory, target.device)

        def gated(features: Tensor) -> Tensor:
            identity = torch.eye(features.size(-1), dtype=features.dtype, device=features.device)
            # W = M B' of a factored table; others return the features that they were given.
            basis, matrix, bias = softmax_operands(self.decoder, identity, self.words.rows)
            scores = gated_scores(
                features.flatten(0, -2),
                matrix,
                target.flatten(),
                gates,
                None if basis is identity else basis,
            )
            scores = scores if bias is None else scores + bias
            return scores.view(*features.shape[:-1], -1)

        with self.output_layer_replaced(gated):
            return super().__call__(model, sample, reduce)

    def _gates(self, memory: WordMemory, device: torch.device) -> Gates:
        words = self.words
        # Special symbols and padding rows are no words, so nothing about them is rare.
        special = torch.arange(words.dictionary.nspecial)
        never_rare = torch.cat([special, words.excluded]).unique()
        gates = gates_of_counts(memory.total, len(memory), self.alpha, never_rare)
        return Gates(*(each.to(device) for each in gates))
