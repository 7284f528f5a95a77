"""Statistics of two values for each row of a table, such as its length and its count."""

from __future__ import annotations

from torch import Tensor


def pearson(x: Tensor, y: Tensor) -> float:
    """Return Pearson's r of two vectors, shape (n,); NaN where one of them is constant."""
    x, y = _centred(x), _centred(y)
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if scale > 0 else float("nan")


def slope(x: Tensor, y: Tensor) -> float:
    """Return the slope of the least-squares line of y over x; NaN where x is constant."""
    x, y = _centred(x), _centred(y)
    spread = float(x @ x)
    return float(x @ y) / spread if spread > 0 else float("nan")


def _centred(x: Tensor) -> Tensor:
    x = x.double() - x[:1].double()  # exactly zero for a constant, whatever its mean is rounded to
    return x - x.mean()
