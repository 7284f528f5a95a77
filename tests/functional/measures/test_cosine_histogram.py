import pytest
import torch

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.cosines import (
    cosine_histogram,
    positive_share,
)


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


def test_one_row():
    with pytest.raises(DataError, match="two rows"):
        cosine_histogram(torch.ones(1, 3))


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
