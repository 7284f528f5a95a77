import pytest
import torch

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.isotropy import covariance_from_gram, isoscore
from tests.reference import isoscore as naive


def cloud(n=83, d=7, seed=0):
    torch.manual_seed(seed)
    return torch.randn(n, d, dtype=torch.float64) @ torch.randn(d, d, dtype=torch.float64) + 2.5


def score(points):
    return isoscore(covariance_from_gram(points.t() @ points, points.sum(0), len(points)))


@pytest.mark.parametrize("n, d", [(83, 7), (5, 2), (31, 13), (4, 6)])
def test_naive_parity(n, d):
    points = cloud(n, d)
    assert score(points) == pytest.approx(naive.isoscore(points), rel=1e-9)


def test_the_published_package_agrees():
    package = pytest.importorskip("IsoScore.IsoScore")
    for seed in range(3):
        points = cloud(seed=seed)
        theirs = float(package.IsoScore(points.numpy()))
        assert score(points) == pytest.approx(theirs, rel=1e-5)


def test_known_answers():
    assert isoscore(4 * torch.eye(9)) == pytest.approx(1)
    line = torch.zeros(9, 9)
    line[2, 2] = 3.0
    assert isoscore(line) == pytest.approx(0, abs=1e-12)
    # k equal directions of n: phi = k/n, score = (k - 1)/(n - 1).
    half = torch.diag(torch.tensor([1.0] * 4 + [0.0] * 5))
    assert isoscore(half) == pytest.approx(3 / 8)
    assert isoscore(torch.zeros(3, 3)) == 0.0


def test_neither_rotation_nor_scale_nor_place_matters():
    points = cloud()
    rotation, _ = torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64))
    assert score(3.7 * points @ rotation - 11) == pytest.approx(score(points), rel=1e-8)


def test_covariance_is_the_sample_covariance():
    points = cloud()
    found = covariance_from_gram(points.t() @ points, points.sum(0), len(points))
    assert torch.allclose(found, torch.cov(points.t()), rtol=1e-9)


def test_too_little():
    with pytest.raises(DataError, match="two dimensions"):
        isoscore(torch.ones(1, 1))
    with pytest.raises(DataError, match="two rows"):
        covariance_from_gram(torch.eye(2), torch.ones(2), 1)
