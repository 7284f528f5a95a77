"""The hull of hidden states."""

import math
from itertools import product

import pytest
import torch

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.predictions import (
    ExpectedPairwiseKL,
    StateStatistics,
    hull_probability,
    origin_in_hull,
)
from tests.reference import measures as naive


def in_blocks(log_probabilities, block):
    found = ExpectedPairwiseKL(log_probabilities.size(1))
    for rows in log_probabilities.split(block):
        found.add(rows)
    return found.value()


@pytest.mark.parametrize("block", [1, 4, 100])
def test_naive_parity(block):
    torch.manual_seed(0)
    rows = (3 * torch.randn(13, 7)).log_softmax(1)
    assert in_blocks(rows, block) == pytest.approx(naive.expected_pairwise_kl(rows), rel=1e-9)


def test_one_context():
    found = ExpectedPairwiseKL(3)
    found.add(torch.zeros(1, 3).log_softmax(1))
    with pytest.raises(DataError, match="two contexts"):
        found.value()


def test_a_word_that_no_context_allows_counts_as_absent():
    allowed = torch.tensor([[0.5, 0.5], [0.2, 0.8]]).log()
    with_impossible = torch.cat([allowed, torch.full((2, 1), -math.inf)], 1)
    assert in_blocks(with_impossible, 1) == pytest.approx(in_blocks(allowed, 1))


def test_what_is_not_a_number_shows():
    contexts = torch.randn(4, 5).log_softmax(1)
    contexts[2] = math.nan
    assert math.isnan(in_blocks(contexts, 2))


def test_against_the_naive_forms():
    torch.manual_seed(0)
    states = torch.randn(47, 9) + 0.5
    states[4] = 0
    statistics = StateStatistics(9)
    for block in states.split(10):
        statistics.add(block)
    assert statistics.mean_cosine() == pytest.approx(naive.mean_cosine(states))
    assert statistics.isoscore() == pytest.approx(naive.isoscore(states.double()))
    with pytest.raises(DataError):
        StateStatistics(3).mean_cosine()


def test_the_hull_of_a_cube():
    corners = torch.tensor(list(product((-1.0, 1.0), repeat=3)))
    for lengths in (torch.ones(8, 1), torch.logspace(0, -9, 8)[:, None]):  # which do not matter
        for point in ((0, 0, 0), (0.9, -0.9, 0.9), (1, 1, 1)):
            assert origin_in_hull(lengths * (corners - torch.tensor(point)))
        for point in ((1.1, 0, 0), (1.01, -1.01, 1.01)):
            assert not origin_in_hull(lengths * (corners - torch.tensor(point)))


@pytest.mark.slow
def test_wendels_probability():
    assert hull_probability(3, 3) == 0
    assert hull_probability(2000, 1000) == pytest.approx(0.5, abs=0.01)
    torch.manual_seed(0)
    hits = sum(origin_in_hull(torch.randn(5, 2)) for _ in range(300))
    assert hits / 300 == pytest.approx(hull_probability(5, 2), abs=3 * math.sqrt(0.25 / 300))
