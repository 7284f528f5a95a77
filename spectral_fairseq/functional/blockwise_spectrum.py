"""Singular values of a matrix that arrives in blocks of rows, such as log-probabilities.

Note [Rank through a Gram matrix]
---------------------------------
80,000 x 10,000 log-probabilities take 3.2 GB, and their SVD takes several times that. The Gram
matrix A'A takes 0.8 GB in float64 and is summed block by block of tokens. It resolves sigma_k only
down to a multiple of sigma_1, by the rule of Note [Roundoff of a Gram matrix]: 2.5e-7 for that
shape. Log-probabilities computed in float32 (eps 1.2e-7) have roundoff of 1.8e-5 sigma_1 for that
shape (``empirical_rank.py``), and for every shape from 5 x 5 the second number is more than four
times the first: no singular value that counts is lost. With a float64 model some would be, so
float64 matrices are refused.
"""

from __future__ import annotations

from typing import List

import torch
from torch import Tensor

from spectral_fairseq.errors import (
    ConfigurationError,
    DataError,
    check_enough,
    check_shape,
)
from spectral_fairseq.functional.gram import accumulate_gram, mirror_gram
from spectral_fairseq.functional.spectra import require_finite, singular_values_of_gram


class BlockwiseSpectrum:
    """Accumulates the singular values of a tall or wide matrix A of m rows and n columns.

    With m >= n it keeps A'A, n x n in float64. With m < n it keeps the rows in the dtype in which
    they arrive and forms AA' at the end. See Note [Rank through a Gram matrix].

    Args:
        most_rows: upper bound of m, which decides which of the two Gram matrices is smaller.
        columns: n.
    """

    def __init__(self, most_rows: int, columns: int) -> None:
        self.rows = 0
        self.columns = columns
        self._kept: List[Tensor] = []
        self._tall = most_rows >= columns
        if self._tall:
            self._gram = torch.zeros(columns, columns, dtype=torch.float64)

    def add(self, block: Tensor) -> None:
        """Append rows.

        Args:
            block: shape (b, n), float32 or narrower.

        Raises:
            ConfigurationError: the block is float64, whose roundoff the Gram matrix cannot resolve.
            DataError: the block does not have n columns.
        """
        if block.dtype == torch.float64:
            raise ConfigurationError(
                "log-probabilities of float32 or narrower",
                "float64",
                "Take torch.linalg.svdvals of the whole matrix instead.",
            )
        remedy = "Use the same model and dictionary for all blocks."
        check_shape("a block", block, (len(block), self.columns), remedy, DataError)
        self.rows += block.size(0)
        if self._tall:
            self._gram = self._gram.to(block.device)  # moves it once, at the first block
            accumulate_gram(self._gram, block.double())
        else:
            self._kept.append(block)

    def singular_values(self) -> Tensor:
        """Return the singular values of the m rows that were added.

        Returns:
            Shape (min(m, n),), float64, largest first.

        Raises:
            DataError: no rows were added, or an entry is infinite or not a number.
        """
        check_enough(self.rows, 1, "row of log-probabilities", "Check that there are data.")
        gram = mirror_gram(self._gram) if self._tall else self._row_gram()
        require_finite(gram, "log-probabilities", "A word has probability 0, or training diverged.")
        sigma = singular_values_of_gram(gram, max(self.rows, self.columns))
        return sigma[: min(self.rows, self.columns)]

    def _row_gram(self) -> Tensor:
        sizes = [block.size(0) for block in self._kept]
        gram = self._kept[0].new_empty(self.rows, self.rows, dtype=torch.float64)
        tiles = gram.split(sizes)
        for i, left in enumerate(self._kept):
            wide = left.double()
            for j, right in enumerate(self._kept[: i + 1]):
                tile = wide @ right.double().t()
                tiles[i].split(sizes, 1)[j].copy_(tile)
                tiles[j].split(sizes, 1)[i].copy_(tile.t())
        return gram
