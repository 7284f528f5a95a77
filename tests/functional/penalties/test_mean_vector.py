import pytest
import torch

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.row_penalties import mean_vector_penalty


def table(n, d):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, d, generator=generator, dtype=torch.float64) + 0.3


@pytest.mark.parametrize("n, d, excluded", [(1, 3, []), (13, 5, [0, 12])])
def test_value_and_gradient(n, d, excluded):
    matrix = table(n, d).requires_grad_()
    value = mean_vector_penalty(matrix, torch.tensor(excluded).long())
    counted = matrix.detach()[[i for i in range(n) if i not in excluded]]
    torch.testing.assert_close(value.detach(), (counted.mean(0) ** 2).sum())
    (gradient,) = torch.autograd.grad(value, matrix)
    expected = (2 * counted.mean(0) / len(counted)).repeat(n, 1)
    expected[excluded] = 0
    torch.testing.assert_close(gradient, expected)


def test_a_shift_of_all_rows_is_all_that_it_sees():
    matrix = table(9, 4)
    centred = matrix - matrix.mean(0)
    assert float(mean_vector_penalty(centred)) < 1e-30
    shift = torch.tensor([3.0, 0, -4, 0], dtype=torch.float64)
    torch.testing.assert_close(mean_vector_penalty(centred + shift), shift.new_tensor(25.0))


def test_a_table_without_words_is_refused():
    with pytest.raises(ConfigurationError, match="at least one row"):
        mean_vector_penalty(torch.ones(2, 3), torch.tensor([0, 1]))
