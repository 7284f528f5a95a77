import math

import pytest
import torch

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.cosines import (
    cosine_histogram,
    mean_cosine,
    mean_cosines,
    nearest_neighbours,
    positive_share,
)
from tests.reference import measures as naive


def random_table(n, d, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return (torch.randn(n, d, dtype=torch.float64) + torch.randn(d, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("n, d", [(7, 3), (37, 5), (12, 11), (3, 5)])
def test_naive_parity(n, d):
    matrix = random_table(n, d)
    assert mean_cosine(matrix) == pytest.approx(naive.mean_cosine(matrix), rel=1e-10)
    excluded = torch.tensor([1])
    kept = torch.cat([matrix[:1], matrix[2:]])
    assert mean_cosine(matrix, excluded) == pytest.approx(naive.mean_cosine(kept), rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [-42, -64, -120, -140])
def test_short_rows(dtype, exponent):
    whole = (random_table(31, 5) * 64).round().to(dtype)  # exact when scaled, and below normal
    whole[4] = 0
    short = whole * 2.0**exponent
    centre = whole[6].double()
    assert mean_cosine(short) == pytest.approx(mean_cosine(whole), rel=1e-5)
    assert mean_cosine(short, centre=centre * 2.0**exponent) == pytest.approx(
        mean_cosine(whole, centre=centre), rel=1e-5
    )
    assert cosine_histogram(short, 20) == cosine_histogram(whole, 20)
    rows = torch.tensor([2, 9])
    expected, places = nearest_neighbours(whole, rows, 3)
    found, at = nearest_neighbours(short, rows, 3)
    assert torch.equal(at, places) and torch.allclose(found, expected)


def test_rounding_of_the_centre_is_no_direction():
    rows = torch.tensor([[1 / 3, 0.1]], dtype=torch.float64).expand(10, 2)
    for dtype in (torch.float32, torch.float64):
        assert mean_cosine(rows.to(dtype), centre=rows.sum(0) / 10) == 0


@pytest.mark.parametrize("measure", [mean_cosine, cosine_histogram])
def test_one_row_has_no_cosines(measure):
    with pytest.raises(DataError, match="two rows"):
        measure(torch.ones(1, 3))


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


@pytest.mark.parametrize("block_rows", [1, 4, 100])
def test_every_pair_is_counted_once(block_rows):
    torch.manual_seed(0)
    matrix = torch.randn(23, 4)
    edges, counts = cosine_histogram(matrix, bins=13, block_rows=block_rows)
    pairs = [
        float(torch.cosine_similarity(matrix[i], matrix[j], dim=0))
        for i in range(23)
        for j in range(i)
    ]
    assert sum(counts) == len(pairs) == 23 * 22 // 2
    for low, high, count in zip(edges, edges[1:], counts):
        assert count == sum(low <= cosine < high for cosine in pairs)


def test_ends_belong_to_the_outer_bins_and_zero_rows_to_the_middle():
    _, counts = cosine_histogram(torch.tensor([[1.0, 0], [2.0, 0], [-1.0, 0], [0, 0]]), bins=3)
    assert counts == [2, 3, 1]


def test_share_of_cosines_that_are_not_negative():
    torch.manual_seed(0)
    matrix = torch.randn(60, 4, dtype=torch.float64) + 0.3
    units = torch.nn.functional.normalize(matrix)
    i, j = torch.triu_indices(60, 60, 1)
    expected = float(((units[i] * units[j]).sum(1) >= 0).double().mean())
    assert positive_share(*cosine_histogram(matrix, 100)) == pytest.approx(expected)


@pytest.mark.slow
def test_more_pairs_than_float32_counts_in_one_bin():
    _, counts = cosine_histogram(torch.ones(20_000, 2), bins=3)
    assert counts == [0, 0, 20_000 * 19_999 // 2]


@pytest.mark.parametrize("block_rows", [3, 10, 1000])
def test_against_all_cosines(block_rows):
    torch.manual_seed(0)
    matrix = torch.randn(29, 5, dtype=torch.float64)
    rows = torch.tensor([0, 28, 7])
    cosines, found = nearest_neighbours(matrix, rows, 4, block_rows=block_rows)
    for row, values, places in zip(rows.tolist(), cosines, found):
        expected = torch.cosine_similarity(matrix[row].expand_as(matrix), matrix, dim=1)
        expected[row] = -2
        assert places.tolist() == expected.argsort(descending=True)[:4].tolist()
        assert torch.allclose(values, expected[places])


def test_small_tables_and_zero_rows():
    matrix = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]])
    cosines, found = nearest_neighbours(matrix, torch.tensor([0]), 10)
    assert found.tolist() == [[1, 2]] and cosines.tolist() == [[0.0, -1.0]]
