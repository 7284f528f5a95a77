"""Equation 6 of the cosine paper, pair by pair."""

import torch


def penalty(matrix, excluded=()):
    rows = [matrix[i].double() for i in range(matrix.size(0)) if i not in set(excluded)]
    units = [row / row.norm() if bool(row.any()) else 0 * row for row in rows]
    total = torch.zeros((), dtype=torch.float64)
    for i, left in enumerate(units):
        for j, right in enumerate(units):
            if i != j:
                total = total + left @ right
    return total / len(rows) ** 2
