import pytest
import torch

from spectral_fairseq.functional.ranks import share_of_first, stable_rank


def test_known_spectra():
    flat = torch.full((7,), 3.0)
    assert share_of_first(flat) == pytest.approx(1 / 7)
    assert stable_rank(flat) == pytest.approx(7)
    one = torch.tensor([0.0, 5.0, 0.0])
    assert (share_of_first(one), stable_rank(one)) == (1.0, 1.0)
    assert share_of_first(torch.tensor([3.0, 1.0])) == pytest.approx(0.75)
    assert stable_rank(torch.tensor([1.0, 3.0])) == pytest.approx(10 / 9)


def test_the_norms_of_a_table():
    torch.manual_seed(1)
    matrix = torch.randn(19, 5, dtype=torch.float64)
    expected = float(matrix.norm() ** 2 / torch.linalg.matrix_norm(matrix, 2) ** 2)
    assert stable_rank(torch.linalg.svdvals(matrix)) == pytest.approx(expected)


def test_a_zero_table_and_half_precision():
    assert (share_of_first(torch.zeros(3)), stable_rank(torch.zeros(3))) == (0.0, 0.0)
    assert stable_rank(torch.full((4,), 300.0, dtype=torch.float16)) == pytest.approx(4)
