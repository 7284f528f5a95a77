"""Leaving out ignored targets equals a boolean mask, gradients included."""

import pytest
import torch

from spectral_fairseq.functional.blocks import without_ignored


@pytest.mark.parametrize("ignored", [(), (0, 3, 4), (0, 1, 2, 3, 4)])
def test_rows_and_gradients_are_those_of_a_mask(ignored):
    targets = torch.tensor([5, 6, 7, 8, 9])
    targets[list(ignored)] = 1
    values = torch.randn(5, 2, 3, requires_grad=True)
    other = torch.randn(5, requires_grad=True)
    kept, *found = without_ignored(1, targets, values, other)
    mask = targets.ne(1)
    assert torch.equal(kept, targets[mask])
    for each, one in zip((values, other), found):
        assert torch.equal(one, each[mask])
        upstream = torch.randn_like(one)
        gradients = [torch.autograd.grad(x, each, upstream)[0] for x in (one, each[mask])]
        torch.testing.assert_close(*gradients)


def test_nothing_is_copied_where_nothing_is_ignored():
    targets, values = torch.tensor([1, 2]), torch.ones(2, 3)
    assert all(a is b for a, b in zip(without_ignored(None, targets, values), (targets, values)))
