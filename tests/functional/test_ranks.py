"""The closed forms against seeded Gaussian tables."""

import math

import pytest
import torch

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.cosines import mean_cosine
from spectral_fairseq.functional.empirical_rank import (
    cumulative_share,
    empirical_rank,
    roundoff_threshold,
)
from spectral_fairseq.functional.random_spectrum import (
    random_mean_share,
    random_spectrum,
    upper_edge,
)
from spectral_fairseq.functional.ranks import (
    effective_rank,
    share_of_first,
    spectrum_measures,
    stable_rank,
)
from spectral_fairseq.functional.spectra import singular_values_of_gram
from tests.functional.test_spectra import spectrum_of
from tests.reference import measures as naive


@pytest.mark.parametrize("d", [1, 3, 11])
def test_naive_parity(d):
    sigma = torch.rand(d, generator=torch.Generator().manual_seed(d), dtype=torch.float64)
    assert effective_rank(sigma) == pytest.approx(naive.effective_rank(sigma.tolist()), rel=1e-9)


def test_known_spectra():
    flat = torch.full((7,), 3.0)
    assert share_of_first(flat) == pytest.approx(1 / 7)
    assert stable_rank(flat) == pytest.approx(7)
    one = torch.tensor([0.0, 5.0, 0.0])
    assert (share_of_first(one), stable_rank(one)) == (1.0, 1.0)
    assert share_of_first(torch.tensor([3.0, 1.0])) == pytest.approx(0.75)
    assert stable_rank(torch.tensor([1.0, 3.0])) == pytest.approx(10 / 9)


def test_a_zero_table_and_half_precision():
    assert (share_of_first(torch.zeros(3)), stable_rank(torch.zeros(3))) == (0.0, 0.0)
    assert stable_rank(torch.full((4,), 300.0, dtype=torch.float16)) == pytest.approx(4)


KEYS = {
    "sigma_max",
    "sigma_2",
    "sigma_median",
    "sigma_min",
    "frobenius_norm",
    "share_of_first",
    "effective_rank",
    "stable_rank",
}


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_from_a_gram_matrix(dtype, rtol):
    torch.manual_seed(0)
    matrix = torch.randn(57, 7, dtype=torch.float64)
    narrow = matrix.to(dtype)
    sigma = singular_values_of_gram(narrow.t() @ narrow, 57)
    expected = torch.linalg.svdvals(matrix)
    assert torch.allclose(sigma, expected, rtol=rtol)
    found = spectrum_measures(sigma)
    assert set(found) == KEYS and all(isinstance(v, float) for v in found.values())
    assert found["frobenius_norm"] == pytest.approx(float(matrix.norm()), rel=rtol)
    assert found["sigma_median"] == pytest.approx(float(expected[3]), rel=rtol)


def test_flat_ordered_and_single():
    found = spectrum_measures(torch.tensor([1.0, 4.0, 2.0]))
    assert [found[f"sigma_{k}"] for k in ("max", "2", "median", "min")] == [4, 2, 2, 1]
    assert spectrum_measures(torch.full((6,), 0.5))["effective_rank"] == pytest.approx(6)
    assert spectrum_measures(torch.tensor([2.0]))["sigma_2"] == 0.0
    assert all(math.isfinite(v) for v in spectrum_measures(torch.zeros(3)).values())


@pytest.mark.parametrize("n, d", [(900, 90), (301, 300), (200, 200), (60, 150)])
def test_the_spectrum_of_marchenko_and_pastur(n, d):
    torch.manual_seed(0)
    rows = 0.7 * torch.randn(n, d, dtype=torch.float64)
    rms = float(rows.square().sum(1).mean().sqrt())
    seen = torch.linalg.svdvals(rows)
    expected = random_spectrum(n, d, rms)
    assert expected.shape == (d,) and (expected.diff() <= 0).all()
    short = min(n, d)
    assert (expected[:short] - seen).abs().max() < 0.05 * seen[0]
    assert (expected[short:] == 0).all()
    assert float(expected.norm()) == pytest.approx(float(rows.norm()), rel=2e-3)
    assert expected[0] < upper_edge(n, d, rms)
    assert float(seen[0]) == pytest.approx(upper_edge(n, d, rms), rel=0.05)


def test_means_of_random_tables():
    torch.manual_seed(1)
    n, d, draws = 200, 20, 60
    shares, cosines = [], []
    for _ in range(draws):
        rows = torch.randn(n, d, dtype=torch.float64)
        shares.append(float(rows.mean(0).norm() / rows.square().sum(1).mean().sqrt()))
        cosines.append(mean_cosine(rows))
    assert sum(shares) / draws == pytest.approx(random_mean_share(n), rel=0.05)
    spread = float(torch.tensor(cosines).std())
    assert spread == pytest.approx(math.sqrt(2 / (n * (n - 1) * d)), rel=0.3)


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
