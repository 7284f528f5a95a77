import pytest
import torch
import torch.nn.functional as F

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.row_penalties import cosine_penalty
from tests.reference import cosine as reference


def table(n, d, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype) + 0.3


SHAPES = [(1, 3, []), (13, 5, []), (29, 7, [0, 11, 28]), (6, 31, [5])]


@pytest.mark.parametrize("n, d, excluded", SHAPES)
def test_penalty_and_gradient_equal_the_pairwise_form(n, d, excluded):
    matrix = table(n, d).requires_grad_()
    fast = cosine_penalty(matrix, torch.tensor(excluded).long())
    (fast_gradient,) = torch.autograd.grad(3 * fast, matrix)
    naive = reference.penalty(matrix, excluded)
    torch.testing.assert_close(fast, naive, rtol=1e-12, atol=1e-14)
    expected = torch.zeros_like(matrix)
    if naive.requires_grad:
        (expected,) = torch.autograd.grad(3 * naive, matrix)
    torch.testing.assert_close(fast_gradient, expected, rtol=1e-10, atol=1e-14)


def test_float32_parity_on_an_odd_shape():
    matrix = table(252, 123)
    fast = cosine_penalty(matrix.float(), torch.tensor([1]))
    torch.testing.assert_close(fast.double(), reference.penalty(matrix, [1]), rtol=1e-5, atol=1e-7)


def test_gradcheck_with_a_non_contiguous_table():
    matrix = table(4, 9).requires_grad_()
    assert torch.autograd.gradcheck(lambda m: cosine_penalty(m.t(), torch.tensor([2])), (matrix,))


def test_equal_rows_orthogonal_rows_and_opposite_rows():
    n = 8
    equal = torch.tensor([0.3, -2.0, 0.1]).expand(n, 3)
    torch.testing.assert_close(cosine_penalty(equal), torch.tensor((n * n - n) / n**2))
    orthogonal = 5 * torch.linalg.qr(table(n, n).float())[0]
    torch.testing.assert_close(cosine_penalty(orthogonal), torch.tensor(0.0), rtol=0, atol=1e-6)
    opposite = torch.tensor([[1.0, 2.0], [-3.0, -6.0]])
    torch.testing.assert_close(cosine_penalty(opposite), torch.tensor(-0.5))


def test_zero_rows_are_finite_and_add_no_cosine():
    matrix = table(7, 4, dtype=torch.float32)
    matrix[3] = 0
    matrix[5] = 1e-30
    matrix.requires_grad_()
    value = cosine_penalty(matrix)
    value.backward()
    rest = matrix.detach()[[0, 1, 2, 4, 6]]
    torch.testing.assert_close(value.detach(), cosine_penalty(rest) * 25 / 49)
    assert torch.isfinite(matrix.grad).all()
    assert matrix.grad[[3, 5]].abs().sum() == 0 and matrix.grad[0].abs().sum() > 0


def test_lengths_do_not_matter_and_gradients_are_tangential():
    matrix = table(17, 6).requires_grad_()
    lengths = torch.linspace(0.01, 40, 17, dtype=torch.float64).unsqueeze(1)
    value = cosine_penalty(matrix)
    torch.testing.assert_close(cosine_penalty(matrix * lengths), value)
    value.backward()
    radial = (matrix.grad * matrix.detach()).sum(1)
    torch.testing.assert_close(radial, torch.zeros_like(radial), rtol=0, atol=1e-15)


def test_a_table_without_words_is_refused():
    with pytest.raises(ConfigurationError, match="at least one row"):
        cosine_penalty(torch.ones(2, 3), torch.tensor([0, 1]))


def test_mean_cosine_falls_in_training():
    """What the paper's Figure 2 shows: with the penalty the vectors leave their common cone."""

    def trained(weight):
        generator = torch.Generator().manual_seed(0)
        matrix = torch.randn(60, 8, generator=generator) + 1.0
        features = torch.randn(256, 8, generator=generator)
        targets = torch.randint(0, 60, (256,), generator=generator)
        matrix.requires_grad_()
        optimiser = torch.optim.Adam([matrix], lr=0.02)
        for _ in range(60):
            loss = F.cross_entropy(features @ matrix.t(), targets)
            optimiser.zero_grad()
            (loss + weight * cosine_penalty(matrix)).backward()
            optimiser.step()
        return float(cosine_penalty(matrix.detach()))

    assert trained(1.0) < trained(0.0)
