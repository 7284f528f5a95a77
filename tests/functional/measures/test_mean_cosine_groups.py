import math

import pytest
import torch

from spectral_fairseq.functional.cosines import mean_cosine, mean_cosines
from tests.reference import isotropy as naive


@pytest.mark.parametrize("block_rows", [1, 7, 1000])
def test_groups_and_centre_against_all_pairs(block_rows):
    torch.manual_seed(0)
    matrix = torch.randn(37, 5, dtype=torch.float64) + 1
    matrix[11] = 0
    group = torch.arange(37) % 3
    group[5] = 3
    centre = matrix.mean(0)
    for c in (None, centre):
        found = mean_cosines(matrix, group, 5, centre=c, block_rows=block_rows)
        moved = matrix if c is None else matrix - c
        for g in range(3):
            assert found[g] == pytest.approx(naive.mean_cosine(moved[group == g]))
        assert math.isnan(found[3]) and math.isnan(found[4])
    assert mean_cosine(matrix, centre=centre) == pytest.approx(naive.mean_cosine(matrix - centre))


def test_narrow_types_are_read_in_float32():
    torch.manual_seed(0)
    matrix = (torch.randn(300, 16) + 0.5).bfloat16()
    expected = naive.mean_cosine(matrix[:40].double())
    assert mean_cosine(matrix[:40]) == pytest.approx(expected, rel=1e-5)
