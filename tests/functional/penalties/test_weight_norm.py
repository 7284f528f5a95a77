import math

import pytest
import torch
import torch.nn.functional as F

from spectral_fairseq.errors import ConfigurationError, DataError
from spectral_fairseq.functional.products import row_norms
from spectral_fairseq.functional.row_penalties import (
    log_count_target,
    smoothed_log_counts,
    weight_norm_penalty,
)
from tests.reference import weight_norm as reference


def table(n, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("n, d, excluded", [(1, 3, []), (13, 5, []), (29, 7, [0, 11, 28])])
@pytest.mark.parametrize("per_word", [False, True])
def test_penalty_and_gradient_equal_the_naive_form(n, d, excluded, per_word):
    matrix = table(n, d).requires_grad_()
    targets = torch.linspace(0.5, 3, n, dtype=torch.float64) if per_word else torch.full((n,), 2.0)
    target = targets if per_word else 2.0
    fast = weight_norm_penalty(row_norms(matrix), target, torch.tensor(excluded).long())
    (fast_gradient,) = torch.autograd.grad(fast, matrix)
    naive = reference.penalty(matrix, targets, excluded)
    (expected,) = torch.autograd.grad(naive, matrix)
    torch.testing.assert_close(fast, naive, rtol=1e-12, atol=0)
    torch.testing.assert_close(fast_gradient, expected, rtol=1e-10, atol=1e-14)


def test_float32_parity_on_an_odd_shape():
    matrix = table(507, 123)
    fast = weight_norm_penalty(row_norms(matrix.float()), 2.0)
    naive = reference.penalty(matrix, [2.0] * 507)
    torch.testing.assert_close(fast.double(), naive, rtol=1e-5, atol=0)


def test_gradcheck():
    matrix = table(7, 3).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda m: weight_norm_penalty(row_norms(m), 1.5, torch.tensor([2])), (matrix,)
    )


def test_equal_rows_give_the_root_of_the_sum():
    matrix = torch.tensor([3.0, 4.0]).expand(9, 2)
    torch.testing.assert_close(weight_norm_penalty(row_norms(matrix), 2.0), torch.tensor(9.0))


def test_norms_at_their_target_and_zero_rows_have_finite_gradients():
    matrix = 2 * F.normalize(table(6, 4), dim=1)
    matrix.requires_grad_()
    value = weight_norm_penalty(row_norms(matrix), 2.0)
    value.backward()
    assert float(value.detach()) <= 1.001e-4 and torch.isfinite(matrix.grad).all()
    matrix = table(6, 4)
    matrix[2] = 0
    matrix.requires_grad_()
    weight_norm_penalty(row_norms(matrix), 2.0).backward()
    assert torch.isfinite(matrix.grad).all() and matrix.grad[2].abs().sum() == 0


def test_norms_gather_round_the_target_in_training():
    def spread(weight):
        generator = torch.Generator().manual_seed(0)
        matrix = torch.randn(60, 8, generator=generator)
        features = torch.randn(256, 8, generator=generator)
        targets = torch.randint(0, 60, (256,), generator=generator)
        matrix.requires_grad_()
        optimiser = torch.optim.Adam([matrix], lr=0.02)
        for _ in range(60):
            loss = F.cross_entropy(features @ matrix.t(), targets)
            penalty = weight_norm_penalty(row_norms(matrix), 2.0)
            optimiser.zero_grad()
            (loss + weight * penalty).backward()
            optimiser.step()
        return float((row_norms(matrix.detach()) - 2.0).abs().mean())

    assert spread(0.1) < 0.5 * spread(0.0)


def test_log_counts_are_positive_and_follow_the_counts():
    logs = smoothed_log_counts([0, 1, 2, 100, 10**9])
    assert float(logs[0]) == float(logs[1]) == pytest.approx(math.log(2))
    assert (logs[1:].diff() > 0).all()
    assert float(logs[3]) == pytest.approx(math.log(100), rel=3e-3)


@pytest.mark.parametrize(
    "counts, message",
    [
        ([], "0 symbols"),
        ([0, 1, 1], "fairseq-preprocess"),
        ([3, -1], "-1"),
        ([3, float("nan")], "nan"),
    ],
)
def test_counts_that_say_nothing_are_refused(counts, message):
    with pytest.raises(DataError, match=message):
        smoothed_log_counts(counts)


def test_target_by_count_keeps_the_mean_of_the_rows_that_count():
    logs = smoothed_log_counts([0, 50, 7, 3, 0])
    target = log_count_target(logs, 2.0, torch.tensor([0, 4]))
    assert float(target[1:4].mean()) == pytest.approx(2.0)
    torch.testing.assert_close(target / target[1], logs / logs[1])
    with pytest.raises(ConfigurationError, match="positive sum"):
        log_count_target(torch.zeros(3), 2.0)
