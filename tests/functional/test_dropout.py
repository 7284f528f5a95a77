"""Fast dropout: its rate, its scale, its gradient, and independent entries."""

import pytest
import torch

from spectral_fairseq.functional.fast_dropout import fast_dropout


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_rate_is_p_in_each_of_the_four_lanes_and_the_rest_is_scaled(p, dtype):
    torch.manual_seed(0)
    count = 400_000
    found = fast_dropout(torch.full((count,), 3.0, dtype=dtype), p)
    kept = found[found != 0]
    exact = 1 - round(p * 2**16) / 2**16
    torch.testing.assert_close(kept, torch.full_like(kept, 3 / exact))
    for lane in range(4):
        share = (found[lane::4] == 0).double().mean().item()
        assert abs(share - p) < 5 * (p * (1 - p) / (count / 4)) ** 0.5


def test_neighbours_are_dropped_independently():
    torch.manual_seed(1)
    dropped = (fast_dropout(torch.ones(400_000), 0.5) == 0).double() - 0.5
    for distance in range(1, 9):
        correlation = (dropped[:-distance] * dropped[distance:]).mean().item() * 4
        assert abs(correlation) < 5 / len(dropped) ** 0.5


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0), (7, 2, 3)])
def test_the_gradient_has_the_same_mask(shape):
    torch.manual_seed(2)
    features = torch.rand(shape).add(1).t() if len(shape) == 2 else torch.rand(shape).add(1)
    features.requires_grad_()
    found = fast_dropout(features, 0.4)
    found.sum().backward()
    assert found.shape == features.shape
    torch.testing.assert_close(features.grad, found.detach() / features.detach())


def test_the_mask_is_that_of_the_seed_and_another_at_each_call():
    features = torch.ones(1000)
    torch.manual_seed(3)
    first, second = fast_dropout(features, 0.3), fast_dropout(features, 0.3)
    torch.manual_seed(3)
    assert torch.equal(first, fast_dropout(features, 0.3))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("p, all_of_them", [(0.0, 1.0), (1e-6, 1.0), (1.0, 0.0)])
def test_what_no_bits_can_say_is_left_to_torch(p, all_of_them):
    torch.manual_seed(4)
    assert torch.equal(fast_dropout(torch.ones(10), p).round(), torch.full((10,), all_of_them))
