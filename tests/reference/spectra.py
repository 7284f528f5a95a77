"""Singular values, and what acts on them, by torch's own decomposition in float64.

In turn: singular values without the excluded rows, orthogonality, the priors and the penalty of
spectrum control, its decoupled step, and the spectral-normalisation and D-optimal penalties.
"""

import math

import torch


# Singular values, on a copy without excluded rows.
def without_rows(matrix, excluded):
    keep = [i for i in range(matrix.size(0)) if i not in set(excluded)]
    return matrix.double()[keep]


def singular_values(matrix, excluded=()):
    return torch.linalg.svdvals(without_rows(matrix, excluded))


# The four orthogonality terms with torch's own matrix norms, on a copy without excluded rows.
def defects(matrix):
    matrix = matrix.double()
    residual = matrix.t() @ matrix - torch.eye(matrix.size(1), dtype=torch.float64)
    return (
        torch.linalg.matrix_norm(residual, "fro") ** 2,
        torch.linalg.matrix_norm(residual, 2) ** 2,
    )


def orthogonality_penalty(u, v, weights):
    u_frobenius, u_spectral = defects(u)
    v_frobenius, v_spectral = defects(v)
    return (
        weights[0] * u_frobenius
        + weights[1] * v_frobenius
        + weights[2] * u_spectral
        + weights[3] * v_spectral
    )


# Priors and penalty of spectrum control, written out term by term.
def prior(kind, dim, c1, c2, gamma):
    if kind == "exponential":
        return [c1 * math.exp(-c2 * k**gamma) for k in range(1, dim + 1)]
    return [c1 * k ** (-gamma) for k in range(1, dim + 1)]


def spectrum_penalty(sigma, target):
    ordered = sorted((abs(float(s)) for s in sigma), reverse=True)
    return sum((s - t) ** 2 for s, t in zip(ordered, target))


# One step of the decoupled control, value by value.
def controlled(weight, prior, rate, side, slack, scale, centering=0.0, excluded=()):
    weight = weight.double().clone()
    kept = [i for i in range(weight.size(0)) if i not in set(excluded)]
    rows = without_rows(weight, excluded)
    rows = rows - centering * rows.mean(0)
    u, sigma, vh = torch.linalg.svd(rows, full_matrices=False)
    size = sum(s**2 for s in sigma.tolist()) ** 0.5
    factor = size / sum(p**2 for p in prior.tolist()) ** 0.5 if scale == "free" else 1.0
    new = []
    for s, p in zip(sigma.tolist(), prior.tolist()):
        target = factor * p
        if side == "above":
            target = min(s, slack * target)
        new.append(s + rate * (target - s))
    if (side, scale) == ("both", "free"):
        longer = size / sum(s**2 for s in new) ** 0.5
        new = [longer * s for s in new]
    weight[kept] = u @ torch.diag(torch.tensor(new, dtype=torch.float64)) @ vh
    return weight


# Squared distance of a normalised spectrum from the flat one, term by term.
def spectral_normalization_penalty(sigma):
    largest = max(abs(float(value)) for value in sigma)
    return sum((1 - abs(float(value)) / largest) ** 2 for value in sigma)


# The D-optimal regulariser by way of the determinant.
def d_optimal_penalty(matrix):
    matrix = matrix.double()
    return -0.5 * torch.logdet(matrix.t() @ matrix)


def d_optimal_gradient(matrix):
    matrix = matrix.double()
    return -matrix @ torch.linalg.inv(matrix.t() @ matrix)
