"""Intervals and tests of paired differences, against scipy and values worked out by hand."""

import math

import numpy as np
import pytest

from spectral_fairseq.errors import ConfigurationError
from studies.significance import holm, paired_t, seeds_and_segments


def test_t_interval_is_that_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    ours, plain = np.array([17.1, 18.4, 16.9, 18.8, 17.5]), np.array([16.0, 17.9, 16.8, 17.0, 17.1])
    test = stats.ttest_rel(ours, plain)
    interval = test.confidence_interval(0.9)
    found = paired_t(list(ours - plain), 0.9)
    assert found == pytest.approx(((ours - plain).mean(), interval.low, interval.high, test.pvalue))


def test_t_interval_of_two_seeds_by_hand():
    # The 97.5 % quantile of one degree of freedom is tan(.475 pi) = 12.706.
    found = paired_t([1.0, 2.0])
    assert found[:3] == pytest.approx((1.5, 1.5 - 12.7062 / 2, 1.5 + 12.7062 / 2), abs=1e-4)
    # P(|T| > 3) of the Cauchy distribution is 1 - 2 atan(3)/pi.
    assert found.p == pytest.approx(1 - 2 * math.atan(3) / math.pi)


def test_differences_without_a_spread():
    assert paired_t([0.5, 0.5]) == (0.5, 0.5, 0.5, 0.0)
    assert paired_t([0.0, 0.0, 0.0]).p == 1.0
    for values in ([], [1.0], [1.0, math.inf]):
        assert all(map(math.isnan, paired_t(values)[1:]))


def test_holm_by_hand():
    # Sorted: .01 x 4, .02 x 3, then .03 x 2 = .06 which is no smaller, then .5.
    assert holm([0.03, 0.01, 0.5, 0.02]) == pytest.approx([0.06, 0.04, 0.5, 0.06])
    # The second would become .06 alone but may not be below the first.
    assert holm([0.04, 0.05]) == pytest.approx([0.08, 0.08])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    missing = holm([math.nan, 0.02, 0.03])
    assert math.isnan(missing[0]) and missing[1:] == pytest.approx([0.04, 0.04])


def ratio(sums):
    return 100 * sums[0] / sums[1]


def test_bootstrap_agrees_with_the_normal_approximation():
    """With one seed and equal lengths, the score is a mean over segments."""
    generator = np.random.default_rng(0)
    baseline, system = (
        np.stack([generator.binomial(10, p, size=(1, 400)), np.full((1, 400), 10)], axis=-1)
        for p in (0.5, 0.6)
    )
    found = seeds_and_segments(baseline, system, ratio, resamples=2000)
    differences = 10.0 * (system - baseline)[0, :, 0]
    half = 1.96 * differences.std(ddof=1) / 20
    assert found.value == pytest.approx(differences.mean())
    assert found[1:] == pytest.approx((found.value - half, found.value + half), abs=0.15 * half)


def test_bootstrap_pairs_seeds_and_draws_them():
    """Seeds move both systems alike; two seeds with differences of 0 and 10 give 0, 5 or 10."""
    baseline = np.array([[[2, 10]] * 3, [[8, 10]] * 3])
    same = seeds_and_segments(baseline, baseline, ratio, resamples=200)
    assert same == (0.0, 0.0, 0.0)
    system = baseline + np.array([[[0, 0]], [[1, 0]]])
    found = seeds_and_segments(baseline, system, ratio, resamples=200)
    assert found == pytest.approx((5.0, 0.0, 10.0))


def test_unequal_systems_are_refused():
    with pytest.raises(ConfigurationError, match=r"\(1, 2, 3\) and \(1, 2, 4\)"):
        seeds_and_segments(np.zeros((1, 2, 3)), np.zeros((1, 2, 4)), ratio)
