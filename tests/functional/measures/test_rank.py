import math

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError, DataError
from spectral_fairseq.functional.linalg.blockwise_spectrum import BlockwiseSpectrum
from spectral_fairseq.functional.measures.rank import (
    cumulative_share,
    empirical_rank,
    roundoff_threshold,
)


def spectrum_of(matrix, block=17, bound=None):
    spectrum = BlockwiseSpectrum(bound or matrix.size(0), matrix.size(1))
    for rows in matrix.split(block):
        spectrum.add(rows)
    return spectrum.singular_values()


@pytest.mark.parametrize("rows, columns", [(61, 23), (23, 61), (40, 40), (1, 5), (5, 1)])
def test_blockwise_singular_values(rows, columns):
    torch.manual_seed(0)
    matrix = torch.randn(rows, columns)
    expected = torch.linalg.svdvals(matrix.double())
    assert torch.allclose(spectrum_of(matrix), expected, rtol=1e-9)


def test_fewer_rows_than_announced():
    matrix = torch.randn(9, 13)
    expected = torch.linalg.svdvals(matrix.double())
    assert torch.allclose(spectrum_of(matrix, bound=500), expected, rtol=1e-7)


def log_softmax_matrix(tokens, words, dim, experts=1, seed=0):
    torch.manual_seed(seed)
    table = torch.randn(words, dim)
    mixed = [
        (torch.randn(tokens, dim) @ table.t()).log_softmax(1) - math.log(experts)
        for _ in range(experts)
    ]
    return torch.logsumexp(torch.stack(mixed), 0)


@pytest.mark.parametrize("tokens, words", [(211, 97), (97, 211)])
def test_a_softmax_is_of_low_rank_and_a_mixture_is_not(tokens, words):
    dim = 6
    softmax = spectrum_of(log_softmax_matrix(tokens, words, dim))
    assert empirical_rank(softmax, tokens, words) == dim + 1
    mixture = spectrum_of(log_softmax_matrix(tokens, words, dim, experts=3))
    assert empirical_rank(mixture, tokens, words) > 90


def test_the_rank_is_that_of_the_whole_svd():
    matrix = log_softmax_matrix(130, 71, 9)
    whole = torch.linalg.svdvals(matrix.double())
    assert empirical_rank(spectrum_of(matrix), *matrix.shape) == empirical_rank(
        whole, *matrix.shape
    )


def test_threshold_of_numerical_recipes():
    assert roundoff_threshold(8.0, 3, 5) == pytest.approx(0.5 * 3 * 8 * 2**-23)
    assert roundoff_threshold(8.0, 3, 5, torch.float64) == pytest.approx(0.5 * 3 * 8 * 2**-52)
    # On the threshold is not above it.
    edge = roundoff_threshold(1.0, 3, 5)
    assert empirical_rank(torch.tensor([1.0, edge, 2 * edge], dtype=torch.float64), 3, 5) == 2
    assert empirical_rank(torch.tensor([]), 0, 5) == 0


def test_cumulative_share():
    sigma = torch.tensor([4.0, 1.0, 2.0, 0.0])
    assert cumulative_share(sigma, [0.0, 0.1, 0.25, 0.5, 0.9, 1.0]) == [
        0.25, 0.25, 0.5, 0.75, 0.75, 1.0,
    ]  # fmt: skip
    with pytest.raises(DataError, match="above zero"):
        cumulative_share(torch.zeros(3), [0.5])


def test_what_cannot_be_measured():
    with pytest.raises(ConfigurationError, match="float64"):
        BlockwiseSpectrum(4, 3).add(torch.ones(2, 3, dtype=torch.float64))
    with pytest.raises(DataError, match="3 columns"):
        BlockwiseSpectrum(4, 3).add(torch.ones(2, 4))
    with pytest.raises(DataError, match="at least one row"):
        BlockwiseSpectrum(4, 3).singular_values()
    for bound in (2, 9):
        with pytest.raises(DataError, match="finite"):
            spectrum_of(torch.tensor([[0.0, -math.inf, 1.0], [1.0, 1.0, 1.0]]), bound=bound)
