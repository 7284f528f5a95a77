"""Measures of the hidden states of one layer, from one pass over blocks of states.

Ethayarajh: "How Contextual are Contextualized Word Representations?", EMNLP 2019,
https://aclanthology.org/D19-1006/, measures their mean cosine; IsoScore is that of
``isoscore.py``.

Liu et al.: "Dispersion loss counteracts embedding condensation and improves generalization in small
language models", ICML 2026, https://arxiv.org/abs/2602.00217: from layer to layer the states of one
sequence point more and more the same way.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from spectral_fairseq.errors import check_enough
from spectral_fairseq.functional.isoscore import covariance_from_gram, isoscore
from spectral_fairseq.functional.row_norms import unit_rows


def _mean_cosine(unit_sum: Tensor, with_direction: int, count: int) -> float:
    """The mean cosine of ``count`` states, as in ``cosines.py``.

    Args:
        unit_sum: sum of their unit vectors, shape (d,).
        with_direction: how many are not zero.
        count: how many there are.
    """
    return (float(unit_sum.square().sum()) - with_direction) / (count * (count - 1))


class StateStatistics:
    """Accumulates what the measures of a layer need, d x d numbers however many states come.

    Args:
        dim: d.
    """

    def __init__(self, dim: int) -> None:
        self.count = 0
        self._gram = torch.zeros(dim, dim, dtype=torch.float64)
        self._sum = torch.zeros(dim, dtype=torch.float64)
        self._unit_sum = torch.zeros(dim, dtype=torch.float64)
        self._with_direction = 0

    def add(self, states: Tensor) -> None:
        """Add states, shape (b, d)."""
        wide = states.detach().double()
        units = unit_rows(wide)
        self.count += wide.size(0)
        self._gram += (wide.t() @ wide).cpu()
        self._sum += wide.sum(0).cpu()
        self._unit_sum += units.sum(0).cpu()
        self._with_direction += int(units.any(1).sum())

    def mean_cosine(self) -> float:
        """Return the mean cosine over all pairs of different states.

        Raises:
            DataError: fewer than two states.
        """
        check_enough(self.count, 2, "states for a mean cosine", "Use more data.")
        return _mean_cosine(self._unit_sum, self._with_direction, self.count)

    def isoscore(self) -> float:
        """Return the IsoScore of the states.

        Raises:
            DataError: fewer than two states or dimensions.
        """
        return isoscore(covariance_from_gram(self._gram, self._sum, self.count))


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
            self._total += _mean_cosine(self._sum, self._with_direction, self._count)
            self._sequences += 1
        self._sequence, self._sum, self._count, self._with_direction = -1, None, 0, 0

    def value(self) -> Optional[float]:
        """The mean over the sequences of two states or more; ``None`` if there are none."""
        self._close()
        return self._total / self._sequences if self._sequences else None
