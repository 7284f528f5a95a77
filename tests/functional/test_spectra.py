import math

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError, DataError
from spectral_fairseq.functional.blockwise_spectrum import BlockwiseSpectrum
from spectral_fairseq.functional.gram import accumulate_gram, gram, mirror_gram, table_gram
from spectral_fairseq.functional.spectra import (
    right_singular_system_of_gram,
    singular_values,
    singular_values_of_gram,
)
from tests.reference import spectra as reference


def table(n, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64)


def right_singular_system(matrix, **how):
    return right_singular_system_of_gram(table_gram(matrix, **how), len(matrix))


@pytest.mark.parametrize("n, d, excluded", [(5, 1, []), (13, 5, []), (123, 7, [0, 60, 122])])
def test_values_and_gradients_equal_those_of_a_decomposition(n, d, excluded):
    matrix = table(n, d).requires_grad_()
    weights = torch.linspace(1, 3, d, dtype=torch.float64)
    fast = singular_values(matrix, torch.tensor(excluded).long())
    (fast_gradient,) = torch.autograd.grad((weights * fast).sum(), matrix)
    naive = reference.singular_values(matrix, excluded)
    (expected,) = torch.autograd.grad((weights * naive).sum(), matrix)
    torch.testing.assert_close(fast, naive, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(fast_gradient, expected, rtol=1e-8, atol=1e-10)


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


def spectrum_of(matrix, block=17, bound=None):
    spectrum = BlockwiseSpectrum(bound or matrix.size(0), matrix.size(1))
    for rows in matrix.split(block):
        spectrum.add(rows)
    return spectrum.singular_values()


@pytest.mark.parametrize("n, d, rank", [(123, 7, 7), (507, 41, 41), (200, 65, 65), (252, 17, 5)])
def test_all_ways_equal_a_decomposition_in_float64(n, d, rank):
    matrix = table(n, d).float().double()  # the blocks have to be float32
    matrix[:, rank:] = matrix[:, :1]
    expected = torch.linalg.svdvals(matrix)
    for found in (
        singular_values(matrix),
        singular_values_of_gram(gram(matrix), n),
        right_singular_system(matrix)[0],
        spectrum_of(matrix.float(), 50),
    ):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found[:rank], expected[:rank], rtol=1e-9, atol=0)
        assert found[rank:].eq(0).all()


@pytest.mark.parametrize("n, d", [(7, 3), (37, 5), (12, 11), (3, 5)])
def test_right_singular_system(n, d):
    matrix = table(n, d)
    sigma, directions = right_singular_system(matrix)
    expected = torch.linalg.svdvals(matrix)
    torch.testing.assert_close(sigma[: len(expected)], expected, rtol=1e-10, atol=0)
    assert sigma[len(expected) :].eq(0).all()
    torch.testing.assert_close(directions.t() @ directions, torch.eye(d, dtype=torch.float64))
    assert torch.allclose((matrix @ directions).norm(dim=0), sigma, atol=1e-7)


def test_right_singular_system_in_blocks():
    matrix, heard = table(53, 7).requires_grad_(), []
    sigma, _ = right_singular_system(matrix)
    in_blocks, _ = right_singular_system(matrix, block_rows=20, progress=heard.append)
    assert heard == [20, 20, 13]
    assert torch.allclose(in_blocks, sigma, rtol=1e-12)
    assert not sigma.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("d", [65, 200, 513])
def test_wide_tables_in_strips(d):
    matrix = table(d + 9, d)
    sigma, directions = right_singular_system(matrix, block_rows=100)
    assert torch.allclose(sigma, torch.linalg.svdvals(matrix), rtol=1e-6)
    assert torch.allclose((matrix @ directions).norm(dim=0), sigma, atol=1e-6)


@pytest.mark.parametrize(
    "matrix, found",
    [
        (torch.zeros(3), r"shape \(3,\)"),
        (torch.zeros(0, 4), r"shape \(0, 4\)"),
        (torch.tensor([[1.0, float("nan")]]), "NaN"),
        (torch.tensor([[1.0, float("inf")]]), "NaN"),
    ],
)
def test_what_is_no_table_is_refused(matrix, found):
    with pytest.raises(DataError, match=found):
        right_singular_system(matrix)


def test_roundoff_is_zero_and_nan_is_refused():
    matrix = torch.randn(200, 3) @ torch.randn(3, 9)
    sigma = singular_values_of_gram(matrix.t() @ matrix, 200)
    assert (sigma[:3] > 0).all() and (sigma[3:] == 0).all()
    with pytest.raises(DataError, match="finite"):
        singular_values_of_gram(torch.full((2, 2), math.nan), 5)


def test_a_large_degenerate_table_keeps_its_whole_spectrum():
    """A common direction of cosine 0.9: the other eigenvalues are 1e-3 of the first."""
    matrix = table(10_000, 128) + 3.0
    exact = torch.linalg.svdvals(matrix)
    leaf = matrix.float().requires_grad_()
    found = singular_values(leaf)
    torch.testing.assert_close(found.double(), exact, rtol=3e-4, atol=0)
    found.log().sum().backward()
    expected = torch.linalg.pinv(matrix).t()
    torch.testing.assert_close(leaf.grad.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dim", [1, 7, 64, 65, 130, 700])
def test_the_whole_product(dim):
    torch.manual_seed(0)
    matrix = torch.randn(37, dim, dtype=torch.float64)
    gram = torch.zeros(dim, dim, dtype=torch.float64)
    for block in matrix.split(11):
        accumulate_gram(gram, block)
    assert mirror_gram(gram) is gram
    torch.testing.assert_close(gram, matrix.t() @ matrix, rtol=1e-11, atol=1e-11)
    assert torch.equal(gram, gram.t())
    # Mirroring again changes nothing, so more blocks may follow.
    assert torch.equal(mirror_gram(gram.clone()), gram)
    accumulate_gram(gram, matrix)
    torch.testing.assert_close(mirror_gram(gram), 2 * matrix.t() @ matrix, rtol=1e-11, atol=1e-11)


def test_excluded_rows_get_no_gradient_at_all():
    """Adam would make whole steps of what is left by rounding."""
    torch.manual_seed(0)
    matrix = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
    excluded = torch.tensor([0, 7])
    gram(matrix, excluded).cumsum(0).square().sum().backward()
    kept = torch.ones(50, dtype=torch.bool)
    kept[excluded] = False
    rows = matrix.detach()[kept].requires_grad_()
    (rows.t() @ rows).cumsum(0).square().sum().backward()
    assert not matrix.grad[excluded].any()
    torch.testing.assert_close(matrix.grad[kept], rows.grad)


@pytest.mark.parametrize("rows, columns, announced, rtol", [
    (61, 23, 61, 1e-9),
    (23, 61, 23, 1e-9),
    (40, 40, 40, 1e-9),
    (1, 5, 1, 1e-9),
    (5, 1, 5, 1e-9),
    (9, 13, 500, 1e-7),
])  # fmt: skip
def test_blockwise_singular_values(rows, columns, announced, rtol):
    torch.manual_seed(0)
    matrix = torch.randn(rows, columns)
    expected = torch.linalg.svdvals(matrix.double())
    assert torch.allclose(spectrum_of(matrix, bound=announced), expected, rtol=rtol)


def test_what_cannot_be_measured():
    with pytest.raises(ConfigurationError, match="float64"):
        BlockwiseSpectrum(4, 3).add(torch.ones(2, 3, dtype=torch.float64))
    with pytest.raises(DataError, match=r"a block of shape \(2, 3\)"):
        BlockwiseSpectrum(4, 3).add(torch.ones(2, 4))
    with pytest.raises(DataError, match="at least one row"):
        BlockwiseSpectrum(4, 3).singular_values()
    for bound in (2, 9):
        with pytest.raises(DataError, match="finite"):
            spectrum_of(torch.tensor([[0.0, -math.inf, 1.0], [1.0, 1.0, 1.0]]), bound=bound)
