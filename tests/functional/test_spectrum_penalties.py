import math

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.d_optimal_penalty import (
    d_optimal_penalty,
    normalized_d_optimal_penalty,
)
from spectral_fairseq.functional.gram import gram
from spectral_fairseq.functional.orthogonality_penalty import (
    dominant_vector,
    orthogonality_penalty,
    spectral_defect,
)
from spectral_fairseq.functional.spectra import singular_values
from spectral_fairseq.functional.spectral_normalization_penalty import (
    spectral_normalization_penalty,
)
from spectral_fairseq.functional.spectrum_penalty import Prior, spectrum_penalty
from tests.functional.test_spectra import table
from tests.reference import spectra as reference


@pytest.mark.parametrize("small", [0, 1, 8, 15])
def test_the_normalised_form_is_free_of_scale_whatever_its_small_values(small):
    """The floor was cut off from sigma_1, which then fell at every update."""
    values = torch.linspace(2.0, 1.0, 16, dtype=torch.float64)
    if small:
        values[-small:] = 1e-20
    sigma = values.clone().requires_grad_()
    found = normalized_d_optimal_penalty(sigma)
    shares = (values / values[0]).clamp(min=torch.finfo(torch.float64).eps)
    torch.testing.assert_close(found, -shares.log().sum())
    found.backward()
    torch.testing.assert_close(sigma.grad @ values, torch.zeros((), dtype=torch.float64))
    assert not sigma.grad[16 - small :].any()
    torch.testing.assert_close(normalized_d_optimal_penalty(3 * values), found.detach())


def test_the_normalised_form_has_a_minimum_whatever_order_and_sign():
    values = torch.tensor([3.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    expected = -torch.tensor([1.0, 2 / 3, 1 / 6], dtype=torch.float64).log().sum()
    torch.testing.assert_close(normalized_d_optimal_penalty(values), expected)
    assert torch.autograd.gradcheck(normalized_d_optimal_penalty, (values,))
    assert float(normalized_d_optimal_penalty(torch.full((4,), 5.0))) == pytest.approx(0, abs=1e-5)


PRIORS = [("exponential", 0.01, 1.0), ("exponential", 0.3, 0.5), ("polynomial", 0.0, 0.5)]


@pytest.mark.parametrize("kind, c2, gamma", PRIORS)
@pytest.mark.parametrize("dim", [1, 7, 123])
def test_prior_equals_its_formula(kind, c2, gamma, dim):
    fast = Prior(kind, 2.5, c2, gamma).spectrum(dim, None)
    naive = torch.tensor(reference.prior(kind, dim, 2.5, c2, gamma), dtype=torch.float64)
    torch.testing.assert_close(fast, naive, rtol=1e-13, atol=0)


@pytest.mark.parametrize("kind, c2, gamma", PRIORS)
def test_automatic_c1_keeps_the_frobenius_norm(kind, c2, gamma):
    prior = Prior(kind, None, c2, gamma).spectrum(57, 31.0)
    assert math.isclose(float(prior.norm()), 31.0, rel_tol=1e-12)
    fixed = Prior(kind, 1.0, c2, gamma).spectrum(57, None)
    torch.testing.assert_close(prior / prior[0], fixed / fixed[0])


@pytest.mark.parametrize("dim", [1, 2, 33])
def test_penalty_equals_its_formula_whatever_order_and_sign(dim):
    generator = torch.Generator().manual_seed(dim)
    sigma = torch.randn(dim, generator=generator, dtype=torch.float64)
    target = Prior("polynomial", 1.3, gamma=0.5).spectrum(dim, None)
    value = spectrum_penalty(sigma, target)
    assert math.isclose(float(value), reference.spectrum_penalty(sigma, target), rel_tol=1e-12)
    shuffled = -sigma[torch.randperm(dim, generator=generator)]
    torch.testing.assert_close(spectrum_penalty(shuffled, target), value)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kind": "linear", "c1": 1.0}, "exponential, polynomial"),
        ({"kind": "exponential", "c1": -1.0}, "expected `c1`"),
        ({"kind": "exponential", "c1": 0.0}, "leave `c1` out"),
        ({"kind": "exponential", "c1": 1.0, "c2": -0.1}, "expected `c2`"),
        ({"kind": "polynomial", "c1": 1.0, "gamma": float("nan")}, "expected `gamma`"),
        ({"kind": "exponential", "c1": 1.0, "c2": 50.0}, "smallest singular value"),
        (
            {"kind": "exponential", "c1": None, "c2": 1e30},
            "smallest singular value",
        ),
    ],
)
def test_bad_prior_is_refused_with_what_to_do(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Prior(**options).spectrum(64, 1.0)


def test_a_prior_of_another_length_is_refused():
    """A column was compared with every value."""
    for shape in ((4,), (5, 1)):
        with pytest.raises(ConfigurationError, match="a prior of shape"):
            spectrum_penalty(torch.ones(5), torch.ones(shape))


def test_an_automatic_scale_needs_the_norm_of_the_table():
    for norm in (None, 0.0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="norm of the table.*diverged"):
            Prior().spectrum(64, norm)
    assert torch.equal(Prior(c1=2.0).spectrum(64, None), Prior(c1=2.0).spectrum(64, 1.0))


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
    naive = reference.orthogonality_penalty(reference.without_rows(u, excluded), v, weights)
    naive.backward()
    torch.testing.assert_close(fast.double(), naive.detach(), rtol=1e-12, atol=1e-12)
    for got, parameter in zip(fast_gradients, (u, v)):
        expected = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        got = got if got is not None else torch.zeros_like(parameter)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_orthonormal_columns_cost_nothing_and_give_finite_gradients():
    """Every eigenvalue of the residual coincides there: the spectral term must stay finite."""
    u = torch.linalg.qr(factors(40, 6)[0])[0].requires_grad_()
    v = torch.eye(6, dtype=torch.float64, requires_grad=True)
    value = orthogonality_penalty(gram(u), gram(v), (1.0, 1.0, 1.0, 1.0))
    value.backward()
    assert float(value.detach()) < 1e-24
    assert torch.isfinite(u.grad).all() and torch.isfinite(v.grad).all()


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
        waits = log.waits()
        gradient = moved.grad.cpu()
    assert not waits
    torch.testing.assert_close(value.detach().cpu(), spectral_defect(residual).detach())
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-3)


def spectrum(d):
    return table(d, 1).flatten()


@pytest.mark.parametrize("d", [1, 2, 57])
def test_penalty_equals_its_formula_whatever_order_sign_and_scale(d):
    sigma = spectrum(d)
    value = spectral_normalization_penalty(sigma)
    assert float(value) == pytest.approx(
        reference.spectral_normalization_penalty(sigma), rel=1e-12, abs=1e-14
    )
    torch.testing.assert_close(spectral_normalization_penalty(-7.5 * sigma.flip(0)), value)
    fast = spectral_normalization_penalty(sigma.float()).double()
    torch.testing.assert_close(fast, value, rtol=1e-5, atol=1e-6)


EQUAL_ROWS = torch.ones(8, 3).index_fill(0, torch.tensor([2]), 0)


def test_flat_and_zero_spectra():
    for sigma, expected in ((torch.full((5,), 3.0), 0), (torch.zeros(4), 4)):
        assert float(spectral_normalization_penalty(sigma)) == expected
    assert float(spectral_normalization_penalty(singular_values(EQUAL_ROWS))) == 2.0


@pytest.mark.parametrize("n, d", [(5, 1), (13, 5), (123, 7)])
def test_penalty_and_gradient_equal_those_of_the_determinant(n, d):
    matrix = table(n, d).requires_grad_()
    value = d_optimal_penalty(singular_values(matrix))
    value.backward()
    torch.testing.assert_close(value.detach(), reference.d_optimal_penalty(matrix.detach()))
    expected = reference.d_optimal_gradient(matrix.detach())
    torch.testing.assert_close(matrix.grad, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("penalty", [d_optimal_penalty, spectral_normalization_penalty])
def test_gradcheck_for_a_learned_spectrum_of_any_order_and_sign(penalty):
    sigma = torch.tensor([0.5, -2.0, 1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(penalty, (sigma,))


@pytest.mark.parametrize("penalty", [
    d_optimal_penalty, normalized_d_optimal_penalty, spectral_normalization_penalty,
])  # fmt: skip
@pytest.mark.parametrize("given", [torch.tensor([1.0, 0, 2]), torch.zeros(4), EQUAL_ROWS])
def test_missing_rank_is_finite(given, penalty):
    leaf = given.clone().requires_grad_()
    value = penalty(leaf if leaf.dim() == 1 else singular_values(leaf))
    value.backward()
    assert torch.isfinite(value) and torch.isfinite(leaf.grad).all()
