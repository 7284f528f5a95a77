"""Empirical rank of a matrix of log-probabilities, and how its singular values are distributed.

Yang, Dai, Salakhutdinov, Cohen: "Breaking the Softmax Bottleneck", ICLR 2018, section 3.3 and
appendix C.1. A is tokens x words, A_tv = log P(v | context t). A softmax over d dimensions has
rank(A) <= d + 1; a mixture is not bound so. The paper counts the singular values above the
expected roundoff of Press et al., "Numerical Recipes", 3rd edition, section 2.6:

    threshold = 1/2 sqrt(m + n + 1) sigma_1 eps,      A of shape (m, n)

and draws, for x in [0, 1], the share of singular values with sigma_k / sigma_1 below x.

Note [Rank through a Gram matrix]
---------------------------------
80,000 x 10,000 log-probabilities are 3.2 GB, and their SVD takes several times that. The Gram
matrix A'A is 0.8 GB in float64, is summed block by block of tokens, and has the eigenvalues
sigma_k^2. It knows sigma_k only down to about sqrt(eps of float64) sigma_1 = 1.5e-8 sigma_1; log-
probabilities computed in float32 (eps 1.2e-7) put the threshold at 1.8e-5 sigma_1 for that shape,
a thousand times higher: nothing that counts is lost. With a float64 model it would be, and such
matrices are refused.
"""

from __future__ import annotations

import math
from typing import List, Sequence

import torch
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError, DataError
from spectral_fairseq.functional.linalg.accumulated_gram import accumulate_gram, mirror_gram


def roundoff_threshold(
    largest: float, rows: int, columns: int, dtype: torch.dtype = torch.float32
) -> float:
    """1/2 sqrt(m + n + 1) sigma_1 eps: below it a singular value is roundoff.

    Args:
        largest: sigma_1.
        rows: m.
        columns: n.
        dtype: in which the matrix was computed, whatever it is stored in since.
    """
    return 0.5 * math.sqrt(rows + columns + 1) * largest * torch.finfo(dtype).eps


def empirical_rank(
    sigma: Tensor, rows: int, columns: int, dtype: torch.dtype = torch.float32
) -> int:
    """Singular values above :func:`roundoff_threshold`.

    Args:
        sigma: singular values, shape (min(m, n),), any order.
        rows: m.
        columns: n.
        dtype: in which the matrix was computed.
    """
    if sigma.numel() == 0:
        return 0
    threshold = roundoff_threshold(float(sigma.max()), rows, columns, dtype)
    return int((sigma > threshold).sum())


def cumulative_share(sigma: Tensor, points: Sequence[float]) -> List[float]:
    """Share of singular values with sigma_k / sigma_1 <= x, for each x of ``points``.

    Args:
        sigma: singular values, any order; not all zero.
        points: x, between 0 and 1.

    Raises:
        DataError: no singular value above zero.
    """
    if sigma.numel() == 0 or float(sigma.max()) <= 0:
        raise DataError(
            "a singular value above zero to normalise by", "none", "Check the matrix: it is zero."
        )
    normalised = (sigma.double() / sigma.double().max()).sort().values
    at = torch.searchsorted(normalised, torch.tensor(list(points), dtype=torch.float64), right=True)
    return (at.double() / sigma.numel()).tolist()


class BlockwiseSpectrum:
    """Singular values of a tall or wide matrix that arrives in blocks of rows.

    See Note [Rank through a Gram matrix]. With m >= n it keeps A'A, n x n in float64; with m < n
    it keeps the rows as they come, m x n in their own type, and forms AA' at the end.

    Args:
        rows: m, at most; known beforehand so that the smaller Gram matrix can be chosen.
        columns: n.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self.rows = 0
        self.columns = columns
        self._kept: List[Tensor] = []
        self._tall = rows >= columns
        if self._tall:
            self._gram = torch.zeros(columns, columns, dtype=torch.float64)

    def add(self, block: Tensor) -> None:
        """Append rows, shape (b, n), of float32 or narrower.

        Raises:
            ConfigurationError: float64, whose roundoff the Gram matrix cannot resolve.
            DataError: not n columns.
        """
        if block.dtype == torch.float64:
            raise ConfigurationError(
                "log-probabilities of float32 or narrower", "float64",
                "Take torch.linalg.svdvals of the whole matrix instead.",
            )  # fmt: skip
        if block.dim() != 2 or block.size(1) != self.columns:
            raise DataError(
                f"rows of {self.columns} columns", f"shape {tuple(block.shape)}",
                "Use one model and one dictionary.",
            )  # fmt: skip
        self.rows += block.size(0)
        if self._tall:
            accumulate_gram(self._gram, block.double())
        else:
            self._kept.append(block)

    def singular_values(self) -> Tensor:
        """Largest first, float64, shape (min(m, n),) for the m rows that came.

        Raises:
            DataError: no rows came, or they hold infinities or NaN.
        """
        if self.rows == 0:
            raise DataError("at least one row", "none", "Check that the data are not empty.")
        gram = mirror_gram(self._gram) if self._tall else self._row_gram()
        if not torch.isfinite(gram).all():
            raise DataError(
                "finite log-probabilities", "infinity or NaN",
                "The model gives some word a probability of exactly zero, or diverged.",
            )  # fmt: skip
        values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(0)
        return values[: min(self.rows, self.columns)]

    def _row_gram(self) -> Tensor:
        blocks = self._kept
        sizes = [block.size(0) for block in blocks]
        gram = torch.empty(self.rows, self.rows, dtype=torch.float64)
        tiles = gram.split(sizes)
        for i, left in enumerate(blocks):
            wide = left.double()
            for j, right in enumerate(blocks[: i + 1]):
                tile = wide @ right.double().t()
                tiles[i].split(sizes, 1)[j].copy_(tile)
                tiles[j].split(sizes, 1)[i].copy_(tile.t())
        return gram
