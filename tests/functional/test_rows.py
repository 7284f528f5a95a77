import math

import pytest
import torch

from spectral_fairseq.functional.correlation import pearson, slope
from spectral_fairseq.functional.robust_scores import OUTLYING, robust_scores
from spectral_fairseq.functional.row_norms import row_lengths
from spectral_fairseq.functional.row_repair import rows_to_repair
from spectral_fairseq.functional.untrained_rows import repeated_rows, untrained_rows


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
