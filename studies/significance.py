"""Intervals and tests of differences between two systems that were trained with the same seeds.

A difference is always taken seed by seed, because initialisation and the order of the data move
both systems alike. :func:`paired_t` says how the mean difference would vary with other seeds on the
same test set; :func:`seeds_and_segments` with other seeds and another test set of the same kind.
"""

from __future__ import annotations

import math
from typing import Callable, List, NamedTuple, Sequence

import numpy as np

from spectral_fairseq.errors import ConfigurationError

RESAMPLES = 10_000


class PairedT(NamedTuple):
    """Mean of paired differences, its confidence interval, and p of a mean of zero (two-sided)."""

    mean: float
    low: float
    high: float
    p: float


def paired_t(differences: Sequence[float], confidence: float = 0.95) -> PairedT:
    """Student's t interval and test of paired differences.

    Args:
        differences: one for each seed. With fewer than two, or one that is not finite, there is
            neither interval nor p: they are NaN.
        confidence: of the interval, between 0 and 1.
    """
    from scipy.stats import t  # an import of half a second

    values = np.asarray(differences, dtype=float)
    mean = float(values.mean()) if len(values) else math.nan
    if len(values) < 2 or not np.isfinite(values).all():
        return PairedT(mean, math.nan, math.nan, math.nan)
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    if error == 0:  # the test statistic is 0/0 or infinite
        return PairedT(mean, mean, mean, float(mean == 0))
    freedom = len(values) - 1
    half = float(t.ppf((1 + confidence) / 2, freedom)) * error
    return PairedT(mean, mean - half, mean + half, 2 * float(t.sf(abs(mean) / error, freedom)))


def holm(p_values: Sequence[float]) -> List[float]:
    """P-values adjusted for their number by Holm's step-down method, in the given order.

    The k-th smallest of m is multiplied by m - k + 1, and none becomes smaller than one before it
    (Holm, 1979, https://www.jstor.org/stable/4615733). NaN stays NaN and is not counted.
    """
    adjusted = [math.nan] * len(p_values)
    counted = [index for index, p in enumerate(p_values) if not math.isnan(p)]
    largest = 0.0
    for rank, index in enumerate(sorted(counted, key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(counted) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


class Interval(NamedTuple):
    """A figure and the percentile interval of its resamples."""

    value: float
    low: float
    high: float


def seeds_and_segments(
    baseline: np.ndarray,
    system: np.ndarray,
    score: Callable[[np.ndarray], float],
    *,
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
    seed: int = 1,
) -> Interval:
    """Bootstrap interval of the mean difference, over seeds and segments together.

    Each resample draws seeds and segments with replacement, the same ones for both systems: seeds,
    because other initialisations give other models; segments, because another test set has other
    sentences. A resample's value is the mean over its seeds of the difference of the corpus scores.

    Args:
        baseline: shape (seeds, segments, k): the counts of each segment from which ``score``
            computes a corpus score once they are summed.
        system: the same of the other system, paired by seed and segment.
        score: of summed counts, shape (k,).
        resamples: number of resamples.
        confidence: of the interval, between 0 and 1.
        seed: of the resampling.

    Raises:
        ConfigurationError: the two differ in shape.
    """
    if baseline.shape != system.shape:
        raise ConfigurationError(
            "two systems with the same seeds and segments",
            f"shapes {baseline.shape} and {system.shape}",
            "Compare translations of the same test set by models of the same seeds.",
        )

    def mean_difference(sums: np.ndarray, seeds: np.ndarray) -> float:
        return float(np.mean([score(sums[1, one]) - score(sums[0, one]) for one in seeds]))

    both = np.stack([baseline, system]).astype(float)  # [2, seeds, segments, k]
    _, count, length, _ = both.shape
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(resamples):
        seeds: np.ndarray = np.asarray(generator.integers(count, size=count))
        times_drawn = np.bincount(generator.integers(length, size=length), minlength=length)
        found.append(mean_difference(np.einsum("asnk,n->ask", both, times_drawn), seeds))
    tail = (1 - confidence) / 2
    low, high = np.quantile(found, [tail, 1 - tail])
    value = mean_difference(both.sum(2), np.arange(count))
    return Interval(value, float(low), float(high))
