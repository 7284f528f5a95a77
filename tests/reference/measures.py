"""Measures of tables and of predictions, written out in float64.

In turn: isotropy and the effective rank, IsoScore, the comparison of two tables, and the divergence
of pairs of predictions.
"""

import math

import torch


# Isotropy measures, term by term.
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


# IsoScore of a cloud of points, step by step as in its paper.
def isoscore(points):
    points = points.double()
    count, n = points.shape
    centred = points - points.mean(0)
    covariance = sum(torch.outer(row, row) for row in centred) / (count - 1)
    # Reorient by PCA: the covariance of the new points is diagonal.
    _, axes = torch.linalg.eigh(covariance)
    reoriented = centred @ axes
    diagonal = torch.tensor([float(column @ column) / (count - 1) for column in reoriented.t()],
                            dtype=torch.float64)  # fmt: skip
    normalised = n**0.5 * diagonal / diagonal.norm()
    defect = float((normalised - 1).norm()) / (2 * (n - n**0.5)) ** 0.5
    used = (n - defect**2 * (n - n**0.5)) ** 2 / n**2
    return (n * used - 1) / (n - 1)


# Kullback-Leibler divergence, pair by pair.
def expected_pairwise_kl(log_probabilities):
    rows = log_probabilities.double()
    total, pairs = 0.0, 0
    for i, p in enumerate(rows):
        for j, q in enumerate(rows):
            if i != j:
                total += float((p.exp() * (p - q)).sum())
                pairs += 1
    return total / pairs


# The mean cosine within sequences.
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
