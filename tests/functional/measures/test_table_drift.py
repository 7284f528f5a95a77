import math

import pytest
import torch

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.rows import centred_products, linear_cka, procrustes_residual
from tests.reference import table_comparison as naive


def pair(n=53, d=7, e=7):
    torch.manual_seed(0)
    left = torch.randn(n, d, dtype=torch.float64) + 2
    return left, left[:, :3] @ torch.randn(3, e).double() + torch.randn(n, e).double() - 1


@pytest.mark.parametrize("block_rows", [5, 1000])
@pytest.mark.parametrize("e", [7, 4])
def test_against_whole_matrices(block_rows, e):
    left, right = pair(e=e)
    products = centred_products(left, right, block_rows=block_rows)
    assert linear_cka(products) == pytest.approx(naive.linear_cka(left, right))
    if e == 7:
        expected = naive.procrustes_residual(left, right)
        assert procrustes_residual(products) == pytest.approx(expected)


def test_rotation_scale_shift_and_choice_of_rows():
    left, _ = pair()
    rotation, _ = torch.linalg.qr(torch.randn(7, 7).double())
    order = torch.randperm(53)
    moved = (3 * left @ rotation + 5)[order]
    products = centred_products(left, moved, order, torch.arange(53))
    assert linear_cka(products) == pytest.approx(1)
    assert procrustes_residual(products) == pytest.approx(0, abs=1e-6)
    assert linear_cka(centred_products(left, moved)) < 0.5


def test_what_cannot_be_compared():
    left, right = pair()
    with pytest.raises(DataError, match="53 and 52 rows"):
        centred_products(left, right[1:])
    for rows in (9, 300):  # the mean of many equal rows is rounded
        same = centred_products(torch.randn(1, 8).expand(rows, 8), torch.randn(rows, 8))
        assert math.isnan(linear_cka(same)) and math.isnan(procrustes_residual(same))
