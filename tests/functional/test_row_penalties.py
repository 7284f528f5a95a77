import pytest
import torch
import torch.nn.functional as F

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.activation_penalties import (
    activation_regularization,
    temporal_activation_regularization,
)
from spectral_fairseq.functional.cosine_penalty import cosine_penalty
from spectral_fairseq.functional.row_norms import row_norms
from spectral_fairseq.functional.weight_norm_penalty import log_count_target, weight_norm_penalty
from spectral_fairseq.functional.word_counts import smoothed_log_counts
from tests.reference import row_penalties as reference


def table(n, d, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype) + 0.3


def to_norms(target):
    """The penalty that draws the norms of the rows to one target, or to one each."""

    def fast(matrix, excluded):
        return weight_norm_penalty(row_norms(matrix), target(len(matrix)), excluded)

    def naive(matrix, excluded):
        targets = target(len(matrix)) * torch.ones(len(matrix), dtype=torch.float64)
        return reference.weight_norm_penalty(matrix, targets, excluded)

    return fast, naive


PENALTIES = {
    "cosine": (cosine_penalty, reference.cosine_penalty),
    "norm": to_norms(lambda n: 2.0),
    "norm of each word": to_norms(lambda n: torch.linspace(0.5, 3, n, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("n, d, excluded", [
    (1, 3, []), (13, 5, []), (13, 5, [0, 12]), (29, 7, [0, 11, 28]), (6, 31, [5]),
])  # fmt: skip
def test_penalty_and_gradient_equal_the_naive_form(name, n, d, excluded):
    fast, naive = PENALTIES[name]
    matrix = table(d, n).t().requires_grad_()  # whose rows are not contiguous
    found, expected = fast(matrix, torch.tensor(excluded).long()), naive(matrix, excluded)
    slack = 1e-14 if name == "cosine" else 0  # of one row it is 0
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=slack)
    (gradient,) = torch.autograd.grad(3 * found, matrix)
    wanted = torch.zeros_like(matrix)
    if expected.requires_grad:  # one row has no cosines
        (wanted,) = torch.autograd.grad(3 * expected, matrix)
    torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-14)


def test_zero_rows_are_finite_and_add_no_cosine():
    matrix = table(7, 4, dtype=torch.float32)
    matrix[3] = 0
    matrix[5] = 1e-39  # whose gradient would be infinite
    matrix.requires_grad_()
    value = cosine_penalty(matrix)
    value.backward()
    rest = matrix.detach()[[0, 1, 2, 4, 6]]
    torch.testing.assert_close(value.detach(), cosine_penalty(rest) * 25 / 49)
    assert torch.isfinite(matrix.grad).all()
    assert matrix.grad[[3, 5]].abs().sum() == 0 and matrix.grad[0].abs().sum() > 0


@pytest.mark.parametrize("scale", [1e-8, 1e-13, 1e-19, 1e-25, 1e-36])
@pytest.mark.parametrize("rows", [slice(None), [0, 4, 9]])
def test_rows_that_are_very_short(scale, rows):
    """Their squares vanish in float32, and rows below 1e-12 counted as zero rows."""
    exact = table(29, 7)
    exact[3] = 0
    exact[rows] *= scale
    matrix = exact.float().requires_grad_()
    exact = matrix.detach().double().requires_grad_()  # as it was rounded
    value = cosine_penalty(matrix, torch.tensor([11]))
    (gradient,) = torch.autograd.grad(value, matrix)
    assert not gradient[[3, 11]].any() and value > 0.01
    # The zero row has no cosines in the naive form either, but no gradient that is defined.
    kept = [row for row in range(29) if row != 3]
    naive = reference.cosine_penalty(exact[kept], [kept.index(11)]) * 27**2 / 28**2
    torch.testing.assert_close(value.double(), naive, rtol=2e-5, atol=0)
    (expected,) = torch.autograd.grad(naive, exact)
    for row in kept:  # each of a size of its own
        error = (gradient[row].double() - expected[row]).norm()
        assert error <= 2e-5 * expected.norm(dim=1)[row] + 1e-30


def test_a_table_without_words_is_refused():
    with pytest.raises(ConfigurationError, match="at least one row"):
        cosine_penalty(torch.ones(2, 3), torch.tensor([0, 1]))


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


def test_targets_of_another_shape_are_refused():
    """A column was compared with every norm."""
    for shape in ((1,), (3, 1)):
        with pytest.raises(ConfigurationError, match="`target` of shape"):
            weight_norm_penalty(torch.ones(3), torch.ones(shape))


def test_target_by_count_keeps_the_mean_of_the_rows_that_count():
    logs = smoothed_log_counts([0, 50, 7, 3, 0])
    target = log_count_target(logs, 2.0, torch.tensor([0, 4]))
    assert float(target[1:4].mean()) == pytest.approx(2.0)
    torch.testing.assert_close(target / target[1], logs / logs[1])
    with pytest.raises(ConfigurationError, match="positive sum"):
        log_count_target(torch.zeros(3), 2.0)


def test_means_of_squares_by_hand():
    h = torch.tensor([[[1.0, 2.0], [3.0, 0.0], [0.0, 0.0]]])
    assert activation_regularization(h).item() == pytest.approx(14 / 6)
    # changes: (2, -2), (-3, 0)
    assert temporal_activation_regularization(h).item() == pytest.approx((8 + 9) / 4)


def test_padding_counts_for_nothing():
    torch.manual_seed(0)
    h = torch.randn(2, 5, 3)
    counted = torch.ones(2, 5, dtype=torch.bool)
    counted[1, 3:] = False
    changed = h.clone()
    changed[1, 3:] = 1e3
    ar = (h[0].square().sum() + h[1, :3].square().sum()) / (8 * 3)
    differences = [h[0, 1:] - h[0, :-1], h[1, 1:3] - h[1, :2]]
    tar = sum(d.square().sum() for d in differences) / (6 * 3)
    for values in (h, changed):
        torch.testing.assert_close(activation_regularization(values, counted), ar)
        torch.testing.assert_close(temporal_activation_regularization(values, counted), tar)
        # Backwards, padding comes first, and squares of changes are the same.
        backwards = values.flip(1), counted.flip(1)
        torch.testing.assert_close(temporal_activation_regularization(*backwards), tar)


@pytest.mark.parametrize("penalty", [activation_regularization, temporal_activation_regularization])
def test_gradients(penalty):
    torch.manual_seed(0)
    h = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    counted = torch.tensor([[True, True, True, True], [True, True, False, False]])
    assert torch.autograd.gradcheck(lambda x: penalty(x, counted), (h,))
    assert torch.autograd.gradcheck(penalty, (h,))


def test_one_position_has_no_change_and_all_padding_is_zero():
    h = torch.ones(2, 1, 3)
    assert temporal_activation_regularization(h).item() == 0
    nothing = torch.zeros(2, 1, dtype=torch.bool)
    assert activation_regularization(h, nothing).item() == 0


def test_half_precision_is_squared_in_float32():
    h = torch.full((1, 2, 4), 300.0, dtype=torch.float16)
    assert activation_regularization(h).item() == 90000.0
