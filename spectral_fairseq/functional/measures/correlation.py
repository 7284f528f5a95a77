"""Correlation of two lists of numbers, such as row norms and log counts."""

from __future__ import annotations

import torch
from torch import Tensor


def pearson(x: Tensor, y: Tensor) -> float:
    """Return Pearson's r of two vectors, shape (n,); NaN where one of them is constant."""
    x, y = _centred(x), _centred(y)
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if scale > 0 else float("nan")


def spearman(x: Tensor, y: Tensor) -> float:
    """Return Spearman's rho: Pearson's r of the ranks, where equal values share their mean rank."""
    return pearson(mean_ranks(x), mean_ranks(y))


def mean_ranks(x: Tensor) -> Tensor:
    """Return ranks from 0 on, shape (n,), float64; equal values share the mean of their ranks."""
    _, group, size = torch.unique(x, sorted=True, return_inverse=True, return_counts=True)
    after = size.double().cumsum(0)
    return (after - (size.double() + 1) / 2)[group]


def slope(x: Tensor, y: Tensor) -> float:
    """Return the slope of the least-squares line of y over x; NaN where x is constant."""
    x, y = _centred(x), _centred(y)
    spread = float(x @ x)
    return float(x @ y) / spread if spread > 0 else float("nan")


def _centred(x: Tensor) -> Tensor:
    x = x.double() - x[:1].double()  # exactly zero for a constant, whatever its mean is rounded to
    return x - x.mean()
