import math

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError, DataError
from spectral_fairseq.functional.spectra import BlockwiseSpectrum


def spectrum_of(matrix, block=17, bound=None):
    spectrum = BlockwiseSpectrum(bound or matrix.size(0), matrix.size(1))
    for rows in matrix.split(block):
        spectrum.add(rows)
    return spectrum.singular_values()


@pytest.mark.parametrize("rows, columns", [(61, 23), (23, 61), (40, 40), (1, 5), (5, 1)])
def test_blockwise_singular_values(rows, columns):
    torch.manual_seed(0)
    matrix = torch.randn(rows, columns)
    expected = torch.linalg.svdvals(matrix.double())
    assert torch.allclose(spectrum_of(matrix), expected, rtol=1e-9)


def test_fewer_rows_than_announced():
    matrix = torch.randn(9, 13)
    expected = torch.linalg.svdvals(matrix.double())
    assert torch.allclose(spectrum_of(matrix, bound=500), expected, rtol=1e-7)


def test_what_cannot_be_measured():
    with pytest.raises(ConfigurationError, match="float64"):
        BlockwiseSpectrum(4, 3).add(torch.ones(2, 3, dtype=torch.float64))
    with pytest.raises(DataError, match="3 columns"):
        BlockwiseSpectrum(4, 3).add(torch.ones(2, 4))
    with pytest.raises(DataError, match="at least one row"):
        BlockwiseSpectrum(4, 3).singular_values()
    for bound in (2, 9):
        with pytest.raises(DataError, match="finite"):
            spectrum_of(torch.tensor([[0.0, -math.inf, 1.0], [1.0, 1.0, 1.0]]), bound=bound)
