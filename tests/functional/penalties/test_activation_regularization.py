import pytest
import torch

from spectral_fairseq.functional.row_penalties import (
    activation_regularization,
    temporal_activation_regularization,
)


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
