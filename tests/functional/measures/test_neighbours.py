import pytest
import torch

from spectral_fairseq.functional.cosines import nearest_neighbours


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
