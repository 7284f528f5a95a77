"""Penalties on the rows of a table, pair by pair in float64.

In turn: cosine regularisation, and the weight-norm paper's regulariser with its table and schedule.
"""

import torch


# Equation 6 of the cosine paper.
def cosine_penalty(matrix, excluded=()):
    rows = [matrix[i].double() for i in range(matrix.size(0)) if i not in set(excluded)]
    units = [row / row.norm() if bool(row.any()) else 0 * row for row in rows]
    total = torch.zeros((), dtype=torch.float64)
    for i, left in enumerate(units):
        for j, right in enumerate(units):
            if i != j:
                total = total + left @ right
    return total / len(rows) ** 2


# Equations 8, 10 and 12 of the weight-norm paper, word by word.
def weight_norm_penalty(matrix, targets, excluded=(), eps=1e-8):
    total = torch.tensor(eps, dtype=torch.float64)
    for i in range(matrix.size(0)):
        if i not in set(excluded):
            total = total + (matrix[i].double().norm() - targets[i]) ** 2
    return total.sqrt()


def weight_norm_table(g, v):
    rows = [g[k].double() * v[k].double() / v[k].double().norm() for k in range(len(g))]
    return torch.stack(rows)


def gradient_scale(t, gamma, tau):
    if t <= tau:
        return 1 - (1 - gamma) * t / tau
    return gamma
