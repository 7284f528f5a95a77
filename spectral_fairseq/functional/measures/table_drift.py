"""How far apart two tables of the same words are, whatever their coordinates.

Both measures subtract the mean row first, A and B then being N x d_a and N x d_b.

* Linear CKA (Kornblith, Norouzi, Lee, Hinton: "Similarity of Neural Network Representations
  Revisited", ICML 2019, https://arxiv.org/abs/1905.00414, equation 5):

      CKA = ||A'B||_F^2 / (||A'A||_F ||B'B||_F)          1: the same up to rotation and scale

* Orthogonal Procrustes (Schönemann, Psychometrika 31, 1966, https://doi.org/10.1007/BF02289451):
  what is left of B after the best rotation Q and scale c, with ||.||_* the sum of singular values,

      min_{c, Q} ||c A Q - B||_F / ||B||_F = sqrt(1 - (||A'B||_* / (||A||_F ||B||_F))^2)

  0: the same up to rotation and scale; the roles of A and B are alike.

CKA follows the directions of the largest variance; the residual counts every direction.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.linalg.row_blocks import BLOCK_ROWS, checked_table


class CentredProducts(NamedTuple):
    """Products of two tables whose mean rows were subtracted, float64.

    Attributes:
        left: A'A, shape (d_a, d_a).
        right: B'B, shape (d_b, d_b).
        cross: A'B, shape (d_a, d_b).
    """

    left: Tensor
    right: Tensor
    cross: Tensor


@torch.no_grad()
def centred_products(
    left: Tensor,
    right: Tensor,
    left_rows: Optional[Tensor] = None,
    right_rows: Optional[Tensor] = None,
    *,
    block_rows: int = BLOCK_ROWS,
) -> CentredProducts:
    """Return the three products, from one pass over blocks of rows.

    Args:
        left: A before centring, shape (n_a, d_a).
        right: B before centring, shape (n_b, d_b).
        left_rows: rows of A to take, shape (N,); all if not given.
        right_rows: those of B that stand for the same words, shape (N,).
        block_rows: rows that are converted to float64 at a time.

    Raises:
        DataError: different numbers of rows, or fewer than two.
    """
    left, right = checked_table(left), checked_table(right)
    one = torch.arange(left.size(0)) if left_rows is None else left_rows
    other = torch.arange(right.size(0)) if right_rows is None else right_rows
    if len(one) != len(other) or len(one) < 2:
        raise DataError(
            "two tables of the same words, at least two",
            f"{len(one)} and {len(other)} rows",
            "Name the rows of the words that both have.",
        )
    width = left.size(1)
    total = left.new_zeros(width + right.size(1), dtype=torch.float64)
    gram = torch.outer(total, total)
    # Without its first row a table of equal rows is zero, and a long mean cancels fewer digits.
    first = torch.cat([left[one[0]].double(), right[other[0]].double()])
    for some, others in zip(one.split(block_rows), other.split(block_rows)):
        both = torch.cat([left[some].double(), right[others].double()], 1)  # [b, d_a + d_b]
        both -= first
        gram.addmm_(both.t(), both)
        total += both.sum(0)
    gram.addr_(total, total, alpha=-1 / len(one))
    return CentredProducts(gram[:width, :width], gram[width:, width:], gram[:width, width:])


def linear_cka(products: CentredProducts) -> float:
    """Return CKA, between 0 and 1; NaN where all rows of a table are equal."""
    scale = float(products.left.norm() * products.right.norm())
    return float(products.cross.norm()) ** 2 / scale if scale > 0 else float("nan")


def procrustes_residual(products: CentredProducts) -> float:
    """Return the residual, between 0 and 1; NaN where all rows of a table are equal."""
    squares = float(products.left.trace() * products.right.trace())
    if squares <= 0:
        return float("nan")
    alike = float(torch.linalg.svdvals(products.cross).sum()) / squares**0.5
    return max(1 - alike**2, 0.0) ** 0.5
