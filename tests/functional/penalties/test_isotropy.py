import pytest
import torch

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.penalties.isotropy import isoscore_penalty
from tests.reference.isoscore import isoscore


def table(n, d, mean=5.0):
    generator = torch.Generator().manual_seed(0)
    scale = torch.linspace(0.2, 2, d, dtype=torch.float64)
    return torch.randn(n, d, generator=generator, dtype=torch.float64) * scale + mean


@pytest.mark.parametrize("n, d, excluded", [(2, 2, []), (13, 5, [0, 12]), (6, 31, [5])])
def test_value_is_the_papers_step_by_step(n, d, excluded):
    matrix = table(n, d)
    counted = matrix[[i for i in range(n) if i not in excluded]]
    value = isoscore_penalty(matrix, torch.tensor(excluded).long())
    assert float(value) == pytest.approx(1 - isoscore(counted), abs=1e-12)
    in_float32 = isoscore_penalty(matrix.float(), torch.tensor(excluded).long())
    assert float(in_float32) == pytest.approx(float(value), abs=1e-5)


def test_gradcheck_and_excluded_rows():
    matrix = table(7, 4).requires_grad_()
    excluded = torch.tensor([1, 6])
    assert torch.autograd.gradcheck(lambda m: isoscore_penalty(m, excluded), (matrix,))
    (gradient,) = torch.autograd.grad(isoscore_penalty(matrix, excluded), matrix)
    assert gradient[excluded].abs().max() < 1e-15 < gradient[0].abs().max()


def test_extremes():
    square = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]]) + 3
    assert float(isoscore_penalty(square)) == pytest.approx(0, abs=1e-6)
    line = torch.linspace(-1, 1, 9)[:, None] * torch.ones(4)
    assert float(isoscore_penalty(line)) == pytest.approx(1, abs=1e-6)
    equal = torch.ones(5, 3, requires_grad=True)
    value = isoscore_penalty(equal)
    (gradient,) = torch.autograd.grad(value, equal)
    assert float(value) == 1 and gradient.abs().max() == 0


@pytest.mark.parametrize("n, d", [(1, 4), (4, 1)])
def test_too_small_a_table_is_refused(n, d):
    with pytest.raises(ConfigurationError, match="at least two words and two dimensions"):
        isoscore_penalty(torch.ones(n, d))


@pytest.mark.parametrize("weight, falls", [(1.0, True), (-1.0, False)])
def test_the_sign_of_the_weight_decides_the_direction(weight, falls):
    matrix = table(40, 6).requires_grad_()
    before = float(isoscore_penalty(matrix))
    optimizer = torch.optim.Adam([matrix], lr=0.02)
    for _ in range(40):
        optimizer.zero_grad()
        (weight * isoscore_penalty(matrix)).backward()
        optimizer.step()
    assert (float(isoscore_penalty(matrix)) < before) is falls
