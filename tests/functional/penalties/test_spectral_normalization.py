import pytest
import torch

from spectral_fairseq.functional.spectra import singular_values
from spectral_fairseq.functional.spectrum_penalties import spectral_normalization_penalty
from tests.reference import spectral_normalization as reference


def spectrum(d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(d, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("d", [1, 2, 57])
def test_penalty_equals_its_formula_whatever_order_sign_and_scale(d):
    sigma = spectrum(d)
    value = spectral_normalization_penalty(sigma)
    assert float(value) == pytest.approx(reference.penalty(sigma), rel=1e-12, abs=1e-14)
    torch.testing.assert_close(spectral_normalization_penalty(-7.5 * sigma.flip(0)), value)
    fast = spectral_normalization_penalty(sigma.float()).double()
    torch.testing.assert_close(fast, value, rtol=1e-5, atol=1e-6)


def test_gradcheck_of_a_spectrum_and_of_a_table():
    sigma = spectrum(6).requires_grad_()
    assert torch.autograd.gradcheck(spectral_normalization_penalty, (sigma,))
    matrix = spectrum(27).view(9, 3).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda m: spectral_normalization_penalty(singular_values(m)), (matrix,)
    )


def test_flat_rank_one_and_zero_spectra():
    assert float(spectral_normalization_penalty(torch.full((5,), 3.0))) == 0
    matrix = torch.ones(8, 3)  # all rows equal
    matrix[2] = 0
    matrix.requires_grad_()
    value = spectral_normalization_penalty(singular_values(matrix))
    value.backward()
    assert float(value.detach()) == 2.0 and torch.isfinite(matrix.grad).all()
    zero = torch.zeros(4, requires_grad=True)
    value = spectral_normalization_penalty(zero)
    value.backward()
    assert float(value.detach()) == 4.0 and torch.isfinite(zero.grad).all()


def test_descent_flattens_the_spectrum_and_leaves_its_scale():
    """Appendix B of the spectrum-control paper: all values close to the largest."""
    matrix = (spectrum(200).view(40, 5) * torch.linspace(0.3, 2, 5)).requires_grad_()
    start = singular_values(matrix.detach())
    optimiser = torch.optim.SGD([matrix], lr=2.0)
    for _ in range(60):
        optimiser.zero_grad()
        spectral_normalization_penalty(singular_values(matrix)).backward()
        # R does not depend on scale, so its gradient does not change the scale.
        assert abs(float((matrix.grad * matrix.detach()).sum())) < 1e-12
        optimiser.step()
    end = singular_values(matrix.detach())
    assert float(end[-1] / end[0]) > 2 * float(start[-1] / start[0])
