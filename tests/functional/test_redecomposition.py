"""Renewed factors: the same table, orthonormal factors, and the gradients of the new factors."""

import pytest
import torch

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.table_control import multiply_, redecomposition, singular_system

EXCLUDED = torch.tensor([0, 40])


def factors(n=123, d=7, seed=0):
    """Factors that are far from orthonormal, one sigma being negative."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(n, d, generator=generator, dtype=torch.float64) + 0.4
    v = torch.eye(d, dtype=torch.float64) + 0.2 * torch.randn(
        d, d, generator=generator, dtype=torch.float64
    )
    sigma = torch.linspace(3, -1, d, dtype=torch.float64)
    return u, torch.where(sigma.abs() < 0.1, 0.5, sigma), v


def renewed(u, sigma, v, scale=1.0):
    new = redecomposition(sigma, v, singular_system(u, sigma, v, EXCLUDED), scale)
    return new, (u @ new.u_map, new.sigma, new.vectors)


def dense(u, sigma, v):
    return (u * sigma) @ v.t()


@pytest.mark.parametrize("scale", [1.0, 3.5])
def test_the_table_stays_and_its_factors_are_its_decomposition(scale):
    old = factors()
    _, (u, sigma, v) = renewed(*old, scale)
    table = dense(*old)
    torch.testing.assert_close(dense(u, sigma, v), table, rtol=1e-10, atol=1e-10)
    counted = [i for i in range(123) if i not in EXCLUDED.tolist()]
    true = torch.linalg.svdvals(table[counted])
    torch.testing.assert_close(sigma * scale, true, rtol=1e-9, atol=1e-9)
    identity = torch.eye(7, dtype=torch.float64)
    torch.testing.assert_close(u[counted].t() @ u[counted], scale**2 * identity)
    torch.testing.assert_close(v.t() @ v, identity)


@pytest.mark.parametrize("scale", [1.0, 3.5])
def test_gradients_of_the_new_factors_follow_from_those_of_the_old(scale):
    """Against autograd at both, for a function of W."""
    target = torch.randn(123, 7, dtype=torch.float64)

    def gradients(*at):
        leaves = [one.detach().clone().requires_grad_() for one in at]
        ((dense(*leaves) - target).pow(3).sum() + dense(*leaves).sin().sum()).backward()
        return [leaf.grad for leaf in leaves]

    old = factors()
    new, at = renewed(*old, scale)
    of_u, _, of_v = gradients(*old)
    expected_u, expected_sigma, expected_v = gradients(*at)
    torch.testing.assert_close(of_u @ new.u_gradient, expected_u)
    torch.testing.assert_close(of_v @ new.v_gradient, expected_v)
    products = torch.einsum("nk,nk->k", at[0], of_u @ new.u_gradient)
    torch.testing.assert_close(products / new.sigma, expected_sigma)


def test_factors_that_are_renewed_already_stay_up_to_signs():
    _, first = renewed(*factors())
    new, second = renewed(*first)
    torch.testing.assert_close(first[1], second[1])
    identity = torch.eye(7, dtype=torch.float64)
    for matrix in (new.u_map, new.u_gradient, new.v_gradient):
        torch.testing.assert_close(matrix.abs(), identity, rtol=0, atol=1e-6)


def test_a_singular_value_of_zero_leaves_the_factors_as_they_are():
    u, sigma, v = factors()
    sigma[3] = 0
    assert redecomposition(sigma, v, singular_system(u, sigma, v)) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e200])
def test_factors_that_are_not_finite_are_refused(value):
    u, sigma, v = factors()
    u[5, 2] = value
    with pytest.raises(DataError, match="an SVD table of finite numbers"):
        redecomposition(sigma, v, singular_system(u, sigma, v))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 1e-2)])
def test_products_in_place_over_several_blocks(dtype, tolerance, monkeypatch):
    monkeypatch.setattr("spectral_fairseq.functional.table_control.BLOCK_ROWS", 50)
    rows, matrix = torch.randn(123, 7), torch.randn(7, 7, dtype=torch.float64)
    product = rows.to(dtype)
    expected = product.double() @ matrix
    multiply_(product, matrix)
    torch.testing.assert_close(product.double(), expected, rtol=tolerance, atol=tolerance)
