import pytest
import torch

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.isoscore import covariance_from_gram, isoscore
from spectral_fairseq.functional.isotropy import (
    centred_log_partition,
    isotropy_i1,
    isotropy_i2,
    log_partition,
)
from tests.functional.test_cosines import random_table
from tests.functional.test_spectra import right_singular_system
from tests.reference import measures as naive


def measures(matrix, **options):
    log_z = log_partition(matrix, right_singular_system(matrix)[1], **options)
    return float(isotropy_i1(log_z)), float(isotropy_i2(log_z))


@pytest.mark.parametrize("n, d", [(7, 3), (37, 5), (12, 11)])
def test_naive_parity(n, d):
    matrix = random_table(n, d)
    z = naive.partitions_both_signs(matrix)
    assert measures(matrix) == pytest.approx((naive.i1(z), naive.i2(z)), rel=1e-10)


def test_float32_and_float16_tables_are_measured_in_float64():
    for dtype in (torch.float32, torch.float16):
        matrix = random_table(41, 6, dtype=dtype)
        assert measures(matrix) == pytest.approx(measures(matrix.double()), rel=1e-12)


def test_large_rows_do_not_overflow():
    i1, i2 = measures(torch.cat([torch.eye(3), -torch.eye(3)]) * 2000)
    assert (i1, i2) == pytest.approx((1, 0), abs=1e-9)


def test_no_gradient_is_recorded():
    matrix = random_table(9, 3).requires_grad_()
    assert not log_partition(matrix, torch.eye(3).double()).requires_grad


@pytest.mark.parametrize("scale", [1.0, 0.1, 250.0])
def test_scales_up_to_those_that_one_exponential_cannot_hold(scale):
    matrix = random_table(53, 7)
    directions = right_singular_system(matrix)[1]
    found = log_partition(matrix, directions, scale=scale, block_rows=11)
    products = matrix @ directions
    expected = torch.stack([torch.logsumexp(sign * scale * products, 0) for sign in (1, -1)])
    expected = torch.where(products.sum(0) >= 0, expected, expected.flip(0))
    assert torch.allclose(found, expected, rtol=1e-12)


def test_z_in_float32_keeps_five_digits():
    matrix = 5 * random_table(5000, 7, dtype=torch.float32)
    directions = right_singular_system(matrix)[1]
    for scale in (1.0, 0.1, 40.0):  # the last is beyond what one exponential of float32 can hold
        exact = log_partition(matrix, directions, scale=scale)
        narrow = log_partition(matrix, directions, scale=scale, dtype=torch.float32)
        assert not torch.equal(narrow, exact)
        assert torch.allclose(narrow, exact, rtol=1e-6, atol=1e-5)


def test_progress_counts_rows():
    matrix, heard = random_table(53, 7), []
    log_partition(matrix, torch.eye(7), block_rows=30, progress=heard.append)
    assert heard == [30, 23]


def test_the_mean_is_taken_out_of_z():
    torch.manual_seed(0)
    matrix = torch.randn(40, 5, dtype=torch.float64) + torch.tensor([2.0, 0, -1, 0, 0])
    directions = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))[0]
    mean = matrix.mean(0)
    found = centred_log_partition(
        log_partition(matrix, directions, scale=0.7), mean, directions, 0.7
    )
    towards = directions * torch.where(mean @ directions < 0, -1.0, 1.0)
    products = 0.7 * (matrix - mean) @ towards
    expected = torch.stack([products.logsumexp(0), (-products).logsumexp(0)])
    torch.testing.assert_close(found, expected)


def cloud(n=83, d=7, seed=0):
    torch.manual_seed(seed)
    return torch.randn(n, d, dtype=torch.float64) @ torch.randn(d, d, dtype=torch.float64) + 2.5


def score(points):
    return isoscore(covariance_from_gram(points.t() @ points, points.sum(0), len(points)))


@pytest.mark.parametrize("n, d", [(83, 7), (5, 2), (31, 13), (4, 6)])
def test_isoscore_equals_the_naive_form(n, d):
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
    for scale in (1.0, 1e-200, 1e200):
        assert isoscore(scale * half.double()) == pytest.approx(3 / 8)
    assert isoscore(torch.zeros(3, 3)) == 0.0


def test_covariance_is_the_sample_covariance():
    points = cloud()
    found = covariance_from_gram(points.t() @ points, points.sum(0), len(points))
    assert torch.allclose(found, torch.cov(points.t()), rtol=1e-9)


def test_too_little():
    with pytest.raises(DataError, match="two dimensions"):
        isoscore(torch.ones(1, 1))
    with pytest.raises(DataError, match="two rows"):
        covariance_from_gram(torch.eye(2), torch.ones(2), 1)
