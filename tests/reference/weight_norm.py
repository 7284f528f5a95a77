"""Equations 8, 10 and 12 of the weight-norm paper, word by word."""

import torch


def penalty(matrix, targets, excluded=(), eps=1e-8):
    total = torch.tensor(eps, dtype=torch.float64)
    for i in range(matrix.size(0)):
        if i not in set(excluded):
            total = total + (matrix[i].double().norm() - targets[i]) ** 2
    return total.sqrt()


def table(g, v):
    rows = [g[k].double() * v[k].double() / v[k].double().norm() for k in range(len(g))]
    return torch.stack(rows)


def gradient_scale(t, gamma, tau):
    if t <= tau:
        return 1 - (1 - gamma) * t / tau
    return gamma
