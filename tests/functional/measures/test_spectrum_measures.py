import math

import pytest
import torch

from spectral_fairseq.functional.ranks import spectrum_measures
from spectral_fairseq.functional.spectra import singular_values_of_gram

KEYS = {
    "sigma_max",
    "sigma_2",
    "sigma_median",
    "sigma_min",
    "frobenius_norm",
    "share_of_first",
    "effective_rank",
    "stable_rank",
}


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_from_a_gram_matrix(dtype, rtol):
    torch.manual_seed(0)
    matrix = torch.randn(57, 7, dtype=torch.float64)
    narrow = matrix.to(dtype)
    sigma = singular_values_of_gram(narrow.t() @ narrow, 57)
    expected = torch.linalg.svdvals(matrix)
    assert torch.allclose(sigma, expected, rtol=rtol)
    found = spectrum_measures(sigma)
    assert set(found) == KEYS and all(isinstance(v, float) for v in found.values())
    assert found["frobenius_norm"] == pytest.approx(float(matrix.norm()), rel=rtol)
    assert found["sigma_median"] == pytest.approx(float(expected[3]), rel=rtol)


def test_flat_ordered_and_single():
    found = spectrum_measures(torch.tensor([1.0, 4.0, 2.0]))
    assert [found[f"sigma_{k}"] for k in ("max", "2", "median", "min")] == [4, 2, 2, 1]
    assert spectrum_measures(torch.full((6,), 0.5))["effective_rank"] == pytest.approx(6)
    assert spectrum_measures(torch.tensor([2.0]))["sigma_2"] == 0.0
    assert all(math.isfinite(v) for v in spectrum_measures(torch.zeros(3)).values())
