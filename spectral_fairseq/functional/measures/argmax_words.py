"""Words that a model never predicts: those that have the highest score for no state of a sample.

The count is exact for the sample. Other states may predict some of these words, so it is an upper
bound for the model. Demeter, Kimmel, Downey: "Stolen Probability", ACL 2020,
https://aclanthology.org/2020.acl-main.198/, show that a word whose output vector lies inside the
convex hull of the others cannot be predicted from any state.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor


class ArgmaxWords:
    """Accumulates which words are predicted, and which ones should have been.

    Args:
        words: N.
        excluded: rows that stand for no word, shape (m,).
    """

    def __init__(self, words: int, excluded: Optional[Tensor] = None) -> None:
        self._counted = torch.ones(words, dtype=torch.bool)
        if excluded is not None:
            self._counted[excluded.cpu()] = False
        self._predicted = torch.zeros(words, dtype=torch.bool)
        self._targets = torch.zeros(words, dtype=torch.bool)

    def add(self, scores: Tensor, targets: Tensor) -> None:
        """Add states.

        Args:
            scores: any increasing function of the logits, shape (b, N).
            targets: the words that follow, shape (b,).
        """
        self._predicted[scores.argmax(1).cpu()] = True
        self._targets[targets.cpu()] = True

    def never(self) -> int:
        """Return the number of words that are the argmax for no state."""
        return int((self._counted & ~self._predicted).sum())

    def missed_targets(self) -> int:
        """Return the number of words that are a target, but the argmax for no state."""
        return int((self._counted & self._targets & ~self._predicted).sum())
