"""Priors and penalty of spectrum control, written out term by term."""

import math


def prior(kind, dim, c1, c2, gamma):
    if kind == "exponential":
        return [c1 * math.exp(-c2 * k**gamma) for k in range(1, dim + 1)]
    return [c1 * k ** (-gamma) for k in range(1, dim + 1)]


def penalty(sigma, target):
    ordered = sorted((abs(float(s)) for s in sigma), reverse=True)
    return sum((s - t) ** 2 for s, t in zip(ordered, target))
