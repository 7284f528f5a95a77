import math

import pytest
import torch

from spectral_fairseq.functional.spectra import singular_values
from spectral_fairseq.functional.spectrum_penalties import (
    d_optimal_penalty,
    normalized_d_optimal_penalty,
)
from tests.reference import d_optimal as reference


def table(n, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("n, d", [(5, 1), (13, 5), (123, 7)])
def test_penalty_and_gradient_equal_those_of_the_determinant(n, d):
    matrix = table(n, d).requires_grad_()
    value = d_optimal_penalty(singular_values(matrix))
    value.backward()
    torch.testing.assert_close(value.detach(), reference.penalty(matrix.detach()))
    expected = reference.gradient(matrix.detach())
    torch.testing.assert_close(matrix.grad, expected, rtol=1e-8, atol=1e-10)


def test_float32_parity_on_an_odd_shape():
    matrix = table(507, 123)
    value = d_optimal_penalty(singular_values(matrix.float()))
    torch.testing.assert_close(value.double(), reference.penalty(matrix), rtol=1e-5, atol=1e-3)


def test_gradcheck_for_a_learned_spectrum_of_any_order_and_sign():
    sigma = torch.tensor([0.5, -2.0, 1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(d_optimal_penalty, (sigma,))
    assert float(d_optimal_penalty(sigma)) == pytest.approx(0.0)


def test_orthogonal_columns_and_the_effect_of_scale():
    columns = torch.linalg.qr(table(30, 6))[0]
    assert float(d_optimal_penalty(singular_values(3 * columns))) == pytest.approx(-6 * math.log(3))


@pytest.mark.parametrize("sigma", [[1.0, 0.0, 2.0], [0.0, 0.0]])
def test_missing_rank_is_finite(sigma):
    values = torch.tensor(sigma, requires_grad=True)
    value = d_optimal_penalty(values)
    value.backward()
    assert torch.isfinite(value) and torch.isfinite(values.grad).all()


def test_equal_rows_and_a_zero_row_are_finite():
    matrix = torch.ones(8, 3)
    matrix[2] = 0
    matrix.requires_grad_()
    value = d_optimal_penalty(singular_values(matrix))
    value.backward()
    assert torch.isfinite(value) and torch.isfinite(matrix.grad).all()


def test_descent_raises_the_smallest_value_most():
    sigma = torch.tensor([4.0, 1.0, 0.25], requires_grad=True)
    d_optimal_penalty(sigma).backward()
    torch.testing.assert_close(sigma.grad, -1 / sigma.detach())


def test_the_normalized_form_has_a_minimum_and_no_scale():
    values = torch.tensor([3.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    expected = -torch.tensor([1.0, 2 / 3, 1 / 6], dtype=torch.float64).log().sum()
    torch.testing.assert_close(normalized_d_optimal_penalty(values), expected)
    torch.testing.assert_close(normalized_d_optimal_penalty(7 * values), expected)
    assert torch.autograd.gradcheck(normalized_d_optimal_penalty, (values,))
    assert float(normalized_d_optimal_penalty(torch.full((4,), 5.0))) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("sigma", [[1.0, 0.0, 2.0], [0.0, 0.0]])
def test_the_normalized_form_is_finite_where_rank_is_missing(sigma):
    values = torch.tensor(sigma, requires_grad=True)
    value = normalized_d_optimal_penalty(values)
    value.backward()
    assert torch.isfinite(value) and torch.isfinite(values.grad).all()
