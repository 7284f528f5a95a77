"""Penalties on the rows of a table and on hidden states, pair by pair in float64.

In turn: cosine regularisation, the weight-norm paper's regulariser with its table and schedule, and
the dispersion loss with the mean cosine within sequences.
"""

import math

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


# The dispersion loss and the mean cosine within sequences.


def dispersion_penalty(layers, counted, tau=1.0):
    total = weights = 0.0
    for row in range(counted.size(0)):
        places = [t for t in range(counted.size(1)) if counted[row, t]]
        weights += len(places)
        for layer in layers:
            values = []
            for i in places:
                for j in places:
                    if i != j:
                        left, right = layer[row, i].double(), layer[row, j].double()
                        lengths = float((left.norm() + 0.01) * (right.norm() + 0.01))
                        cosine = min(max(float(left @ right) / lengths, -0.75), 0.75)
                        values.append(math.exp(-math.acos(cosine) / math.pi / tau))
            if values:
                total += len(places) * math.log(sum(values) / len(values)) / len(layers)
    return total / weights


def sequence_cosine(sequences):
    means = []
    for states in sequences:
        pairs = [(i, j) for i in range(len(states)) for j in range(len(states)) if i != j]
        cosines = [
            float(states[i].double() @ states[j].double() / states[i].norm() / states[j].norm())
            for i, j in pairs
        ]
        means.append(sum(cosines) / len(pairs))
    return sum(means) / len(means)
