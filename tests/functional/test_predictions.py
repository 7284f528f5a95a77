"""The divergence of predictions, and the measures of hidden states."""

import math

import pytest
import torch

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.hidden_states import StateStatistics
from spectral_fairseq.functional.pairwise_kl import ExpectedPairwiseKL
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
