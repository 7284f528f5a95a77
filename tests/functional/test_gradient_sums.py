"""Sums of gradients over the blocks of a batch."""

from types import SimpleNamespace

import pytest
import torch

from spectral_fairseq.functional import products
from spectral_fairseq.functional.gradient_sums import GradientForm, GradientSums, scaled_gradients


def test_sums_of_gradients_begin_at_zero_whatever_comes_first(monkeypatch):
    """Memory is not cleared for a first block of all words; other blocks, and none, need it."""
    rows, scores, table = torch.randn(3, 4), torch.randn(3, 6), torch.randn(6, 4)
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *shape, **kwargs: empty(*shape, **kwargs).fill_(torch.nan)
    )

    def sums():
        return GradientSums(rows, table, None, torch.float32, (False, True, False))

    whole, parts, none = sums(), sums(), sums()
    whole.add_block(slice(3), rows, scores.clone(), table)
    for part in (slice(0, 2), slice(2, 6)):
        parts.add_block(slice(3), rows, scores[:, part].clone(), table[part], first_word=part.start)
    expected = scores.t() @ rows
    torch.testing.assert_close(whole.results()[1], expected)
    torch.testing.assert_close(parts.results()[1], expected)
    whole.add_block(slice(3), rows, scores.clone(), table)
    torch.testing.assert_close(whole.results()[1], 2 * expected)
    assert torch.equal(none.results()[1], torch.zeros(6, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("blocks", [0, 1, 2])
@pytest.mark.parametrize("smoothing", [False, True])
def test_a_single_block_has_the_gradients_of_a_wide_sum(smoothing, blocks, dtype, monkeypatch):
    """bfloat16 products, also under autocast, in which the table has float32 numbers.

    The wide sum is rounded after the factor, if at all, the rows of a single block before the
    product.
    """
    monkeypatch.setattr(products, "AT_ONCE", 16 * 16 * 2)  # three parts of 40 rows
    torch.manual_seed(0)
    rows, table = torch.randn(64, 16).bfloat16(), torch.randn(40, 16).bfloat16()
    targets, hits = torch.randint(30, (64,)), torch.rand(64)
    weights, factor, shift = torch.rand(64), torch.tensor(0.3), torch.randn(16)
    scores = torch.rand(2, 64, 40).bfloat16()
    form = GradientForm(targets, weights, hits)
    exact = torch.zeros(40, 16, dtype=torch.float64)
    for block in range(blocks):
        exact += scores[block].double().t() @ (rows.double() * weights[:, None])
        exact.index_add_(0, targets, -hits[:, None] * rows.double())
    exact = (exact + shift * smoothing) * factor

    def gradients(single):
        needed = (True, True, False)
        sums = GradientSums(rows, table.to(dtype), None, torch.float32, needed, single)
        for block in range(blocks):
            sums.add_block(slice(64), rows, scores[block].clone(), table, form)
        if smoothing:
            sums.matrix.add_to_all(shift)
        ctx = SimpleNamespace()
        ctx.save_for_backward = lambda *saved: setattr(ctx, "saved_tensors", saved)
        sums.save(ctx)
        assert (ctx.saved_tensors[1] is None) == (single and blocks == 1)
        return scaled_gradients(ctx, factor)

    found, expected = gradients(single=blocks < 2), gradients(single=False)
    assert found[1].dtype == dtype and torch.equal(found[0], expected[0])
    errors = [float((one[1] - exact).norm()) for one in (found, expected)]
    assert errors[0] <= (1.1 if dtype == torch.bfloat16 else 2) * errors[1]
    assert errors[1] <= 2**-7 * float(exact.norm())
