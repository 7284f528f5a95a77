"""Measures of the hidden states of one layer, from one pass over blocks of states.

Ethayarajh: "How Contextual are Contextualized Word Representations?", EMNLP 2019,
https://aclanthology.org/D19-1006/, measures their mean cosine; IsoScore is that of ``isoscore.py``.

An outlier dimension (Kovaleva, Kulshreshtha, Rogers, Rumshisky: "BERT Busters", Findings of ACL
2021, https://aclanthology.org/2021.findings-acl.300/, and Timkey, van Schijndel: "All Bark and No
Bite", EMNLP 2021, https://aclanthology.org/2021.emnlp-main.372/) is one whose root mean square over
the states lies 5 robust standard deviations (``robust_outliers.py``) above the median of all
dimensions. A few of them can decide every cosine.
"""

from __future__ import annotations

from typing import List

import torch
from torch import Tensor

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.linalg.row_norms import unit_rows
from spectral_fairseq.functional.measures.isoscore import covariance_from_gram, isoscore
from spectral_fairseq.functional.measures.robust_outliers import OUTLYING, robust_scores


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
        if self.count < 2:
            raise DataError("at least two states for a mean cosine", str(self.count), "Add data.")
        pairs = self.count * (self.count - 1)
        return (float(self._unit_sum.square().sum()) - self._with_direction) / pairs

    def isoscore(self) -> float:
        """Return the IsoScore of the states.

        Raises:
            DataError: fewer than two states or dimensions.
        """
        return isoscore(covariance_from_gram(self._gram, self._sum, self.count))

    def outlier_dimensions(self) -> List[int]:
        """Return the outlier dimensions, the largest first."""
        scores = robust_scores(self._root_mean_squares())
        order = scores.argsort(descending=True)
        return order[scores[order] > OUTLYING].tolist()

    def rms_norm(self) -> float:
        """Return the root mean square of the norms of the states."""
        return float(self._root_mean_squares().norm())

    def _root_mean_squares(self) -> Tensor:
        return (self._gram.diagonal() / max(self.count, 1)).sqrt()
