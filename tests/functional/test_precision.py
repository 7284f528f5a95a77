"""Penalties and products of 16-bit tables, and under autocast, are computed in float32."""

import pytest
import torch

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.cosine_penalty import cosine_penalty
from spectral_fairseq.functional.cosines import cosine_histogram, mean_cosine, nearest_neighbours
from spectral_fairseq.functional.gram import gram
from spectral_fairseq.functional.orthogonality_penalty import spectral_defect
from spectral_fairseq.functional.row_norms import row_norms
from spectral_fairseq.functional.spectra import singular_values
from spectral_fairseq.functional.weight_norm_penalty import weight_norm_penalty

FUNCTIONS = {
    "cosine": cosine_penalty,
    "weight norm": lambda table: weight_norm_penalty(row_norms(table), 1.0),
    "singular values": lambda table: singular_values(table)[-3:].sum(),
    "spectral defect": lambda table: spectral_defect(gram(table) / len(table)),
}


def value_and_gradient(function, table, autocast=False):
    table = table.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        value = function(table)
        (gradient,) = torch.autograd.grad(value, table)
    return value.detach().double(), gradient.double()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_table_of_16_bits(name, dtype):
    """Sums over so many rows with a mean leave the range of float16."""
    torch.manual_seed(0)
    table = (torch.randn(20_000, 16) + 4).to(dtype)
    value, gradient = value_and_gradient(FUNCTIONS[name], table)
    exact, exact_gradient = value_and_gradient(FUNCTIONS[name], table.double())
    torch.testing.assert_close(value, exact, rtol=2e-3, atol=1e-6)
    assert torch.isfinite(gradient).all()
    if dtype is torch.bfloat16:  # gradients of the mean lie below the smallest float16
        assert (
            float(torch.cosine_similarity(gradient.flatten(), exact_gradient.flatten(), 0)) > 0.99
        )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_under_autocast(name):
    """A loop may call backward inside, too, where gradients were rounded to eight bits."""
    torch.manual_seed(0)
    table = torch.randn(300, 8)
    expected = value_and_gradient(FUNCTIONS[name], table)
    found = value_and_gradient(FUNCTIONS[name], table, autocast=True)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("function", [
    mean_cosine,
    cosine_histogram,
    lambda table: nearest_neighbours(table, torch.arange(9), 5),
])  # fmt: skip
def test_cosines_under_autocast(function):
    """They were rounded to eight bits."""
    torch.manual_seed(0)
    table = torch.randn(300, 8)
    expected = function(table)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = function(table)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("function", [singular_values, lambda table: spectral_defect(gram(table))])
def test_what_is_not_a_number_is_named(function):
    table = torch.randn(9, 4)
    table[3, 2] = float("nan")
    with pytest.raises(DataError, match="infinity or NaN"):
        function(table)
