import math

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.spectrum_penalties import prior_spectrum, spectrum_penalty
from tests.reference import spectrum as reference

PRIORS = [("exponential", 0.01, 1.0), ("exponential", 0.3, 0.5), ("polynomial", 0.0, 0.5)]


@pytest.mark.parametrize("kind, c2, gamma", PRIORS)
@pytest.mark.parametrize("dim", [1, 7, 123])
def test_prior_equals_its_formula(kind, c2, gamma, dim):
    fast = prior_spectrum(kind, dim, c1=2.5, c2=c2, gamma=gamma, dtype=torch.float64)
    naive = torch.tensor(reference.prior(kind, dim, 2.5, c2, gamma), dtype=torch.float64)
    torch.testing.assert_close(fast, naive, rtol=1e-13, atol=0)


@pytest.mark.parametrize("kind, c2, gamma", PRIORS)
def test_automatic_c1_keeps_the_frobenius_norm(kind, c2, gamma):
    prior = prior_spectrum(kind, 57, c2=c2, gamma=gamma, frobenius_norm=31.0, dtype=torch.float64)
    assert math.isclose(float(prior.norm()), 31.0, rel_tol=1e-12)
    fixed = prior_spectrum(kind, 57, c1=1.0, c2=c2, gamma=gamma, dtype=torch.float64)
    torch.testing.assert_close(prior / prior[0], fixed / fixed[0])


@pytest.mark.parametrize("dim", [1, 2, 33])
def test_penalty_equals_its_formula_whatever_order_and_sign(dim):
    generator = torch.Generator().manual_seed(dim)
    sigma = torch.randn(dim, generator=generator, dtype=torch.float64)
    target = prior_spectrum("polynomial", dim, c1=1.3, gamma=0.5, dtype=torch.float64)
    value = spectrum_penalty(sigma, target)
    assert math.isclose(float(value), reference.penalty(sigma, target), rel_tol=1e-12)
    shuffled = -sigma[torch.randperm(dim, generator=generator)]
    torch.testing.assert_close(spectrum_penalty(shuffled, target), value)


def test_penalty_is_zero_at_the_prior_and_gradcheck():
    target = prior_spectrum("exponential", 9, c1=2.0, c2=0.1, gamma=1.0, dtype=torch.float64)
    assert float(spectrum_penalty(target.flip(0), target)) == 0
    sigma = torch.linspace(-2, 3, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: spectrum_penalty(s, target), (sigma,))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kind": "linear", "c1": 1.0}, "exponential, polynomial"),
        ({"kind": "exponential", "c1": -1.0}, "`c1`"),
        ({"kind": "exponential", "c1": 0.0}, "leave `c1` out"),
        ({"kind": "exponential", "c1": 1.0, "c2": -0.1}, "`c2`"),
        ({"kind": "polynomial", "c1": 1.0, "gamma": float("nan")}, "`gamma`"),
        ({"kind": "exponential", "c1": 1.0, "c2": 50.0}, "smallest singular value"),
        (
            {"kind": "exponential", "c1": None, "c2": 1e30, "frobenius_norm": 1.0},
            "smallest singular value",
        ),
        ({"kind": "polynomial"}, "`frobenius_norm`"),
    ],
)
def test_bad_prior_is_refused_with_what_to_do(options, message):
    kind = options.pop("kind")
    with pytest.raises(ConfigurationError, match=message):
        prior_spectrum(kind, 64, **options)
