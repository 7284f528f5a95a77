"""A Gram matrix summed up over blocks of rows, at little more than half the products.

    G = sum_b M_b' M_b

G is symmetric, so each block adds to strips of columns from the diagonal on; the rest is mirrored
once, at the end.
"""

from __future__ import annotations

from torch import Tensor

# 8 strips leave 9/16 of the products; narrower ones than this would not keep the cores busy.
_STRIPS = 8
_LEAST_WIDTH = 64


def accumulate_gram(gram: Tensor, block: Tensor) -> None:
    """Add M'M to the upper triangle of ``gram``; below the diagonal it stays meaningless.

    Args:
        gram: shape (d, d), changed in place.
        block: M, shape (b, d), of the same type.
    """
    dim = block.size(1)
    width = max(-(-dim // _STRIPS), _LEAST_WIDTH)
    for start in range(0, dim, width):
        strip = block[:, start : start + width]  # [b, width]
        gram[start : start + width, start:].addmm_(strip.t(), block[:, start:])


def mirror_gram(gram: Tensor) -> Tensor:
    """Copy the upper triangle below the diagonal, in place; strip by strip, without a second G.

    Args:
        gram: shape (d, d), as :func:`accumulate_gram` left it.

    Returns:
        ``gram``.
    """
    dim = gram.size(0)
    width = max(-(-dim // _STRIPS), _LEAST_WIDTH)
    for start in range(0, dim, width):
        end = start + width
        square = gram[start:end, start:end]
        square.copy_(square.triu() + square.triu(1).t())
        gram[end:, start:end].copy_(gram[start:end, end:].t())
    return gram
