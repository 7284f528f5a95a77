"""Sums of gradients over the blocks of a batch."""

from types import SimpleNamespace

import pytest
import torch

from spectral_fairseq.functional.gradient_sums import GradientSums, scaled_gradients


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
def test_a_narrow_sum_of_one_block_has_the_gradients_of_the_wide_one(smoothing, blocks, dtype):
    """bfloat16 products, also under autocast, in which the table has float32 numbers."""
    rows, table = torch.randn(6, 4).bfloat16(), torch.randn(5, 4).bfloat16()
    targets, hits = torch.tensor([1, 3, 1, 0, 1, 4]), torch.rand(6)
    factor, shift = torch.tensor(0.3), torch.randn(4)

    def gradient(is_wide):
        needed, single = (True, True, False), blocks < 2 and not is_wide
        sums = GradientSums(rows, table.to(dtype), None, torch.float32, needed, single)
        for block in range(blocks):
            scores = torch.randn(6, 5, generator=torch.Generator().manual_seed(block))
            sums.add_block(slice(6), rows, scores, table, targets, torch.ones(6), hits)
        if smoothing:
            sums.add_to_all_words(shift)
        ctx = SimpleNamespace()
        ctx.save_for_backward = lambda *saved: setattr(ctx, "saved_tensors", saved)
        sums.save(ctx)
        kept = ctx.saved_tensors[1].dtype
        assert kept == (torch.bfloat16 if blocks == 1 and not is_wide else torch.float32)
        return scaled_gradients(ctx, factor)

    found, expected = gradient(False), gradient(True)
    assert found[1].dtype == dtype and torch.equal(found[1], expected[1])
    assert torch.equal(found[0], expected[0])
