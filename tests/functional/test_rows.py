import math

import pytest
import torch

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.products import row_lengths
from spectral_fairseq.functional.rows import (
    OUTLYING,
    centred_products,
    linear_cka,
    pearson,
    procrustes_residual,
    repeated_rows,
    robust_scores,
    rows_to_repair,
    slope,
    untrained_rows,
)
from tests.reference import measures as naive


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
    with pytest.raises(DataError, match="53 rows of the other table; found 52"):
        centred_products(left, right[1:])
    for rows in (9, 300):  # the mean of many equal rows is rounded
        same = centred_products(torch.randn(1, 8).expand(rows, 8), torch.randn(rows, 8))
        assert math.isnan(linear_cka(same)) and math.isnan(procrustes_residual(same))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_each_rule_finds_its_rows(dtype):
    torch.manual_seed(0)
    matrix = torch.randn(3000, 32).to(dtype)
    assert untrained_rows(matrix, matrix.double().norm(dim=1)).tolist() == []
    matrix[7] = 0
    matrix[20] = matrix[2990]
    matrix[100] *= 1 / 16
    found = untrained_rows(matrix, matrix.double().norm(dim=1))
    assert found.tolist() == [7, 20, 100, 2990]


@pytest.mark.parametrize("block_rows", [3, 2048])
def test_rows_are_compared_bit_for_bit(block_rows):
    torch.manual_seed(0)
    matrix = torch.randn(40, 6)
    matrix[[4, 17, 39]] = matrix[0].clone()
    matrix[17, 2] = torch.nextafter(matrix[17, 2], torch.tensor(9.0))
    found = repeated_rows(matrix, block_rows=block_rows)
    assert found.nonzero().squeeze(1).tolist() == [0, 4, 39]


def test_robust_scores():
    torch.manual_seed(0)
    normal = 3 + 2 * torch.randn(100_001, dtype=torch.float64)
    assert float(robust_scores(normal).std()) == pytest.approx(1, rel=0.02)
    assert float(robust_scores(normal).abs().max()) < OUTLYING
    assert (robust_scores(torch.tensor([1.0, 1.0, 1.0, 9.0])) == 0).all()


def test_narrow_numbers_in_float64_do_not_collide():
    """Their low bits are zero, and so would be those of a product."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(50_000, 16, generator=generator).half().double()
    assert not repeated_rows(rows).any()
    rows[7] = rows[4]
    assert repeated_rows(rows).nonzero().flatten().tolist() == [4, 7]


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


def test_untrained_rows_do_not_depend_on_the_scale():
    torch.manual_seed(0)
    rows = torch.randn(200, 8)
    rows[3], rows[5] = 0, rows[5] * 1e-4
    for scale in (1.0, 2.0**-60, 2.0**-100):
        lengths = row_lengths(rows * scale)
        assert untrained_rows(rows * scale, lengths).tolist() == [3, 5]
        assert rows_to_repair(rows * scale, ["zero"]).tolist() == [3]
