"""Isotropy measures written out term by term, float64."""

import math

import torch


def partition(matrix, direction):
    return sum(math.exp(sum(float(w) * float(a) for w, a in zip(row, direction))) for row in matrix)


def partitions_both_signs(matrix):
    """Z over +a and -a for the right singular vectors a of W."""
    _, _, vh = torch.linalg.svd(matrix.double(), full_matrices=True)
    return [partition(matrix.double(), sign * a) for a in vh for sign in (1, -1)]


def i1(z):
    return min(z) / max(z)


def i2(z):
    mean = sum(z) / len(z)
    return math.sqrt(sum((value - mean) ** 2 for value in z) / (len(z) * mean**2))


def mean_cosine(matrix):
    rows = matrix.double()
    total, count = 0.0, 0
    for i in range(len(rows)):
        for j in range(len(rows)):
            if i != j:
                norms = float(rows[i].norm() * rows[j].norm())
                total += float(rows[i] @ rows[j]) / norms if norms else 0.0
                count += 1
    return total / count


def effective_rank(sigma):
    total = sum(sigma)
    return math.exp(-sum(s / total * math.log(s / total) for s in sigma if s > 0))
