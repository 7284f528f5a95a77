import pytest
import torch

from spectral_fairseq.functional.spectra import gram
from spectral_fairseq.functional.spectrum_penalties import (
    dominant_vector,
    orthogonality_penalty,
    spectral_defect,
)
from tests.reference import orthogonality as reference


def factors(n, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(n, d, generator=generator, dtype=torch.float64) / n**0.5
    v = torch.eye(d, dtype=torch.float64)
    v = v + 0.1 * torch.randn(d, d, generator=generator, dtype=torch.float64)
    return u, v


@pytest.mark.parametrize("n, d, excluded", [(13, 5, []), (123, 7, [0, 60, 122]), (31, 30, [1])])
@pytest.mark.parametrize(
    "weights", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0.3, 0.7, 2.0, 0.1)]
)
def test_penalty_and_gradient_equal_the_naive_form(n, d, excluded, weights):
    u, v = (x.requires_grad_() for x in factors(n, d))
    fast = orthogonality_penalty(gram(u, torch.tensor(excluded).long()), gram(v), weights)
    fast.backward()
    fast_gradients = u.grad, v.grad
    u.grad = v.grad = None
    naive = reference.penalty(reference.without_rows(u, excluded), v, weights)
    naive.backward()
    torch.testing.assert_close(fast.double(), naive.detach(), rtol=1e-12, atol=1e-12)
    for got, parameter in zip(fast_gradients, (u, v)):
        expected = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        got = got if got is not None else torch.zeros_like(parameter)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_float32_parity_on_an_odd_shape():
    u, v = factors(507, 123)
    weights = (1.0, 1.0, 1.0, 1.0)
    fast = orthogonality_penalty(gram(u.float()), gram(v.float()), weights)
    naive = reference.penalty(u, v, weights)
    torch.testing.assert_close(fast.double(), naive, rtol=1e-5, atol=1e-6)


def test_gradcheck():
    u, v = (x.requires_grad_() for x in factors(11, 4, seed=3))

    def penalty(u, v):
        return orthogonality_penalty(gram(u, torch.tensor([2])), gram(v), (0.5, 0.4, 0.3, 0.2))

    assert torch.autograd.gradcheck(penalty, (u, v))


def test_orthonormal_columns_cost_nothing_and_give_finite_gradients():
    """Every eigenvalue of the residual coincides there: the spectral term must stay finite."""
    u = torch.linalg.qr(factors(40, 6)[0])[0].requires_grad_()
    v = torch.eye(6, dtype=torch.float64, requires_grad=True)
    value = orthogonality_penalty(gram(u), gram(v), (1.0, 1.0, 1.0, 1.0))
    value.backward()
    assert float(value.detach()) < 1e-24
    assert torch.isfinite(u.grad).all() and torch.isfinite(v.grad).all()


def test_spectral_term_is_exact_where_one_power_iteration_is_not():
    u, _ = factors(200, 50, seed=5)
    exact = orthogonality_penalty(gram(u), torch.eye(50).double(), (0, 0, 1.0, 0))
    torch.testing.assert_close(exact, reference.defects(u)[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "eigenvalues",
    [
        (3.0, -1.0, 0.5, 0.0),
        (-2.0, 1.9, 1.0, 0.1),
        (2.0, -2.0, 1.0, 0.5),  # of equal size and opposite sign
        (1.0, 1.0, 1.0, -1.0),
        (1.0, 0.9999, -0.9998, 0.0),  # closer than the squarings can separate
        (0.0, 0.0, 0.0, 0.0),
    ],
)
def test_dominant_vector_has_the_spectral_norm(eigenvalues):
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(4, 4, generator=generator))
    symmetric = (basis * torch.tensor(eigenvalues)) @ basis.t()
    found = (symmetric @ dominant_vector(symmetric)).norm()
    assert abs(float(found) - max(map(abs, eigenvalues))) < 1e-3


def test_spectral_defect_on_a_gpu_has_the_value_and_gradient_of_the_cpu():
    virtual = pytest.importorskip("tests.cuda.virtual_cuda", exc_type=ImportError)
    generator = torch.Generator().manual_seed(1)
    residual = torch.randn(6, 6, generator=generator)
    residual = (residual + residual.t()).requires_grad_()
    expected = torch.autograd.grad(spectral_defect(residual), residual)[0]
    with virtual.virtual_cuda() as log:
        moved = residual.detach().cuda().requires_grad_()
        log.events.clear()
        value = spectral_defect(moved)
        value.backward()
        waits = log.ours("sync")
        gradient = moved.grad.cpu()
    assert not waits
    torch.testing.assert_close(value.detach().cpu(), spectral_defect(residual).detach())
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-3)
