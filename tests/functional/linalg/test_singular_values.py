import pytest
import torch

from spectral_fairseq.functional.linalg.singular_values import singular_values
from tests.reference import singular_values as reference


def table(n, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("n, d, excluded", [(5, 1, []), (13, 5, []), (123, 7, [0, 60, 122])])
def test_values_and_gradients_equal_those_of_a_decomposition(n, d, excluded):
    matrix = table(n, d).requires_grad_()
    weights = torch.linspace(1, 3, d, dtype=torch.float64)
    fast = singular_values(matrix, torch.tensor(excluded).long())
    (fast_gradient,) = torch.autograd.grad((weights * fast).sum(), matrix)
    naive = reference.values(matrix, excluded)
    (expected,) = torch.autograd.grad((weights * naive).sum(), matrix)
    torch.testing.assert_close(fast, naive, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(fast_gradient, expected, rtol=1e-8, atol=1e-10)


def test_float32_parity_on_an_odd_shape():
    matrix = table(507, 123)
    fast = singular_values(matrix.float()).double()
    torch.testing.assert_close(fast, reference.values(matrix), rtol=1e-4, atol=0)


def test_gradcheck():
    matrix = table(9, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda m: singular_values(m, torch.tensor([3])), (matrix,))


def test_repeated_values_have_the_gradient_of_a_symmetric_function():
    matrix = torch.linalg.qr(table(12, 4))[0].mul(3).requires_grad_()
    singular_values(matrix).pow(2).sum().backward()  # the squared Frobenius norm
    torch.testing.assert_close(matrix.grad, 2 * matrix.detach())


def test_missing_rank_is_zero_with_finite_gradients():
    matrix = table(20, 5).float()
    matrix[:, 4] = matrix[:, 3]
    matrix[2] = 0
    matrix.requires_grad_()
    values = singular_values(matrix)
    values.sum().backward()
    assert float(values[-1].detach()) == 0 and float(values[-2].detach()) > 0.1
    assert torch.isfinite(matrix.grad).all()
