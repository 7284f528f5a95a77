"""The closed forms against seeded Gaussian tables."""

import math

import pytest
import torch

from spectral_fairseq.functional.cosines import mean_cosine
from spectral_fairseq.functional.ranks import (
    random_cka,
    random_mean_share,
    random_procrustes,
    random_spectrum,
    upper_edge,
)
from spectral_fairseq.functional.rows import centred_products, linear_cka, procrustes_residual


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


def test_means_and_drift_of_random_tables():
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


@pytest.mark.parametrize("widths", [(40, 40), (40, 160), (160, 40)])
def test_the_likeness_of_two_random_tables(widths):
    torch.manual_seed(1)
    products = centred_products(*(torch.randn(4000, width) for width in widths))
    assert linear_cka(products) == pytest.approx(random_cka(4000, *widths), rel=0.1)
    # The square, since it is the small distance from 1 that tells one baseline from another.
    alike = 1 - random_procrustes(4000, *widths) ** 2
    assert 1 - procrustes_residual(products) ** 2 == pytest.approx(alike, rel=0.05)
