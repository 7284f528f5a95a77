"""How tokens are cut into blocks, and which of them are left out."""

import pytest
import torch

from spectral_fairseq.functional import blocks, token_measures
from spectral_fairseq.functional.blocks import (
    BlockScores,
    filled,
    padded,
    rows_for,
    softmax_,
    token_blocks,
    without_ignored,
)


@pytest.mark.parametrize("block", [1, 7, 100])
@pytest.mark.parametrize("tokens", [0, 1, 6, 7, 8, 99, 100, 101, 350])
def test_every_token_is_in_one_block(tokens, block):
    parts = list(token_blocks(tokens, block))
    assert [i for part, _ in parts for i in range(tokens)[part]] == list(range(tokens))
    assert all(part.stop - part.start <= rows <= block for part, rows in parts)
    assert all(rows == block for _, rows in parts[:-1])


def test_a_block_of_a_large_dictionary_has_tokens_for_half_the_width():
    def rows(words, dim, *options):
        return blocks.tokens_per_block(torch.empty(words, dim), *options)

    assert rows(267_735, 2) == blocks.BLOCK_ELEMENTS // 267_735
    assert rows(267_735, 410) == 205
    assert rows(1000, 410) == blocks.BLOCK_ELEMENTS // 1000
    assert rows(267_735, 410, 267_735) == 1
    assert rows(267_735, 410, None, 5) == 41  # of a mixture of five
    assert rows(267_735, 410, None, 1000) == 1
    assert rows(10_000, 2, None, 1, True) == 2 * blocks.BLOCK_ELEMENTS // 10_000
    assert rows(267_735, 410, None, 1, True) == 410
    assert rows(267_735, 410, None, 1, True, 821) == 410
    assert rows(267_735, 410, None, 1, True, 820) == 820  # all of them


def test_sizes_are_few_and_near():
    sizes = {rows_for(tokens, 1000) for tokens in range(1, 1001)}
    assert len(sizes) <= 4 * 10
    assert all(rows_for(size, 1000) == size for size in sizes)
    assert max(rows_for(tokens, 1000) / tokens for tokens in range(1, 1001)) <= 1.25


def test_filled_and_padded():
    values = torch.arange(6.0).view(3, 2)
    assert filled(values, 3) is values and padded(values, 3) is values
    assert torch.equal(filled(values, 5), torch.cat([values, values[-1:], values[-1:]]))
    assert torch.equal(padded(values, 5), torch.cat([values, torch.zeros(2, 2)]))


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


def test_softmax_overwrites_the_scores():
    scores = torch.randn(5, 4097) * 30
    probabilities, log_z = torch.softmax(scores, -1), torch.logsumexp(scores, -1)
    torch.testing.assert_close(softmax_(scores), log_z)
    torch.testing.assert_close(scores, probabilities)


@pytest.mark.parametrize("few", [1, 3, 7, 100])
@pytest.mark.parametrize("with_margin", [False, True])
def test_bfloat16_products_are_overwritten_by_their_softmax_in_float32(
    few, with_margin, monkeypatch
):
    rows, words = torch.randn(7, 5).bfloat16(), torch.randn(11, 5).bfloat16()
    targets, margin = torch.arange(7), torch.rand(7) if with_margin else None
    scores = (rows @ words.t()).float()
    if with_margin:
        scores[torch.arange(7), targets] -= margin
    monkeypatch.setattr(token_measures, "CACHED_SCORES", few * 11)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    block_scores = BlockScores(words, None, torch.bfloat16)
    probabilities, log_z, target_scores = block_scores.softmax(rows, targets, margin)
    torch.testing.assert_close(probabilities, scores.softmax(1).bfloat16(), rtol=0, atol=2**-9)
    torch.testing.assert_close(log_z, scores.logsumexp(1))
    torch.testing.assert_close(target_scores, scores.diagonal(), rtol=0, atol=0)


def test_scores_with_a_bias_stay_in_float32():
    rows, words = torch.randn(7, 5).bfloat16(), torch.randn(11, 5).bfloat16()
    block_scores = BlockScores(words, torch.randn(11), torch.bfloat16)
    probabilities, _, _ = block_scores.softmax(rows, torch.arange(7))
    expected = ((rows @ words.t()).float() + block_scores.bias).softmax(1)
    torch.testing.assert_close(probabilities, expected)
