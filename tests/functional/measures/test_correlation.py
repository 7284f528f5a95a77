import math

import pytest
import torch

from spectral_fairseq.functional.rows import pearson, slope


def test_known_answers():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert pearson(x, 5 - 3 * x) == pytest.approx(-1)
    assert slope(x, 5 - 3 * x) == pytest.approx(-3)


def test_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    torch.manual_seed(0)
    x, y = torch.randn(50), torch.randint(0, 5, (50,)).double()  # with ties
    assert pearson(x, y) == pytest.approx(stats.pearsonr(x, y)[0])
    assert slope(x, y) == pytest.approx(stats.linregress(x, y)[0])


def test_constants_have_no_correlation():
    x, one = torch.arange(3.0), torch.ones(3)
    assert all(math.isnan(value) for value in (pearson(x, one), slope(one, x)))
    assert slope(x, one) == 0
    tenths = torch.full((1000,), 0.1, dtype=torch.float64)  # their mean is rounded
    y = torch.arange(1000.0)
    assert math.isnan(slope(tenths, y)) and math.isnan(pearson(tenths, y))
