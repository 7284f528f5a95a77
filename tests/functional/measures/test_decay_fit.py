import pytest
import torch

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.ranks import fit_exponential, fit_polynomial
from spectral_fairseq.functional.spectrum_penalties import prior_spectrum, spectrum_penalty

D = torch.float64


@pytest.mark.parametrize("c1, gamma", [(31.2, 0.5), (12.3, 0.25), (0.02, 1.7)])
@pytest.mark.parametrize("dim", [5, 64, 513])
def test_polynomial_priors_are_found_again(c1, gamma, dim):
    fit = fit_polynomial(prior_spectrum("polynomial", dim, c1=c1, gamma=gamma, dtype=D))
    assert (fit["c1"], fit["gamma"]) == pytest.approx((c1, gamma), rel=1e-5)
    assert fit["relative_error"] < 1e-6


@pytest.mark.parametrize("c1, c2, gamma", [(8.2, 0.005, 1.0), (8.2, 0.3, 0.4), (2.0, 0.0005, 1.0)])
@pytest.mark.parametrize("dim", [64, 513])
def test_exponential_priors_are_found_again(c1, c2, gamma, dim):
    sigma = prior_spectrum("exponential", dim, c1=c1, c2=c2, gamma=gamma, dtype=D)
    fit = fit_exponential(sigma)
    assert fit["relative_error"] < 1e-6
    assert (fit["c1"], fit["c2"], fit["gamma"]) == pytest.approx((c1, c2, gamma), rel=2e-3)


def test_a_flat_spectrum_has_no_decay():
    flat = torch.full((17,), 2.5)
    assert fit_exponential(flat) == pytest.approx(
        {"c1": 2.5, "c2": 0.0, "gamma": 1.0, "relative_error": 0.0}, abs=1e-9
    )
    assert fit_polynomial(flat)["gamma"] == pytest.approx(0, abs=1e-6)


def test_no_neighbouring_parameters_are_better():
    torch.manual_seed(3)
    sigma = (torch.rand(40, dtype=D) + 0.2).sort(descending=True).values
    for fit_of, kind in ((fit_exponential, "exponential"), (fit_polynomial, "polynomial")):
        fit = fit_of(sigma)
        error = fit.pop("relative_error")
        best = float(spectrum_penalty(sigma, prior_spectrum(kind, 40, dtype=D, **fit)))
        assert (best / float(sigma.square().sum())) ** 0.5 == pytest.approx(error, rel=1e-9)
        for name in fit:
            for factor in (0.99, 1.01):
                worse = prior_spectrum(kind, 40, dtype=D, **{**fit, name: factor * fit[name]})
                assert float(spectrum_penalty(sigma, worse)) >= best


def test_order_and_sign_do_not_matter():
    sigma = torch.tensor([3.0, -1.0, 2.0, 0.5])
    assert fit_polynomial(sigma) == fit_polynomial(torch.tensor([3.0, 2.0, 1.0, 0.5]))


def test_nothing_to_fit():
    for sigma in (torch.zeros(4), torch.ones(1), torch.tensor([1.0, float("nan")])):
        for fit in (fit_exponential, fit_polynomial):
            with pytest.raises(DataError, match="singular values"):
                fit(sigma)
