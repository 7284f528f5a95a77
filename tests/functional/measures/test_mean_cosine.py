import pytest
import torch

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.cosines import mean_cosine
from tests.reference import isotropy as naive


def random_table(n, d, seed=0):
    torch.manual_seed(seed)
    return torch.randn(n, d, dtype=torch.float64) + torch.randn(d, dtype=torch.float64)


@pytest.mark.parametrize("n, d", [(7, 3), (37, 5), (12, 11), (3, 5)])
def test_naive_parity(n, d):
    matrix = random_table(n, d)
    assert mean_cosine(matrix) == pytest.approx(naive.mean_cosine(matrix), rel=1e-10)
    excluded = torch.tensor([1])
    kept = torch.cat([matrix[:1], matrix[2:]])
    assert mean_cosine(matrix, excluded) == pytest.approx(naive.mean_cosine(kept), rel=1e-10)


def test_equal_rows():
    assert mean_cosine(torch.tensor([[3.0, 0.0]]).expand(10, 2)) == pytest.approx(1, rel=1e-6)


def test_invariant_under_rotation_permutation_and_scale():
    matrix = random_table(31, 5, seed=1)
    q, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))
    for other in (matrix @ q, matrix[torch.randperm(31)], 7 * matrix):
        assert mean_cosine(other) == pytest.approx(mean_cosine(matrix), rel=1e-9)


def test_zero_row_counts_but_has_no_direction():
    matrix = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    assert mean_cosine(matrix) == pytest.approx(2 / 6)
    assert naive.mean_cosine(matrix) == pytest.approx(2 / 6)


def test_one_row_has_no_mean_cosine():
    with pytest.raises(DataError, match="two rows"):
        mean_cosine(torch.ones(1, 3))
