import math

import pytest
import torch

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.ranks import cumulative_share, empirical_rank, roundoff_threshold
from spectral_fairseq.functional.spectra import BlockwiseSpectrum


def spectrum_of(matrix, block=17, bound=None):
    spectrum = BlockwiseSpectrum(bound or matrix.size(0), matrix.size(1))
    for rows in matrix.split(block):
        spectrum.add(rows)
    return spectrum.singular_values()


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
        0.25,
        0.25,
        0.5,
        0.75,
        0.75,
        1.0,
    ]
    with pytest.raises(DataError, match="above zero"):
        cumulative_share(torch.zeros(3), [0.5])
