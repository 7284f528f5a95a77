"""How tokens are cut into blocks, and what the losses make of the rows that only fill a block."""

import pytest
import torch

from spectral_fairseq.functional import adaptive_loss as adaptive_softmax
from spectral_fairseq.functional import blocks
from spectral_fairseq.functional import mixture_loss as mixture
from spectral_fairseq.functional import softmax_loss as blockwise
from spectral_fairseq.functional.blocks import (
    filled,
    padded,
    rows_for,
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


def softmax_loss(contexts, targets, matrix, bias):
    return blockwise.blockwise_cross_entropy(
        contexts[:, 0], targets, matrix, bias, label_smoothing=0.1
    )[0]


def mixture_loss(contexts, targets, matrix, bias):
    prior = torch.log_softmax(contexts[..., 0], -1)
    return mixture.mixture_cross_entropy(contexts, prior, targets, matrix, bias)[0]


def smoothed_mixture_loss(contexts, targets, matrix, bias):
    prior = torch.log_softmax(contexts[..., 0], -1)
    return mixture.mixture_cross_entropy(
        contexts, prior, targets, matrix, bias, label_smoothing=0.1
    )[0]


def log_mixture_loss(contexts, targets, matrix, bias):
    prior = torch.log_softmax(contexts[..., 0], -1)
    found = mixture.log_mixture(contexts, prior, matrix, bias)
    return -found.gather(1, targets.unsqueeze(1)).sum() - 0.1 * found.sum()


def adaptive_loss(contexts, targets, matrix, bias):
    return adaptive_softmax.adaptive_cross_entropy(
        contexts[:, 0], contexts[:, 1, :2], targets, matrix, bias, (5, 11)
    )


LOSSES = [softmax_loss, mixture_loss, smoothed_mixture_loss, log_mixture_loss, adaptive_loss]


def one_block_as_it_is(tokens, _block):
    return [(slice(0, tokens), tokens)] if tokens else []


def inputs(tokens):
    torch.manual_seed(2)
    contexts = torch.randn(90, 3, 4, dtype=torch.float64)[:tokens].requires_grad_()
    targets = torch.randint(31, (90,))[:tokens]
    # A bias under which a row of zeros would weigh, if it weighed anything.
    leaves = contexts, *(torch.randn(31, *s, dtype=torch.float64) for s in ((4,), ()))
    contexts, matrix, bias = (leaf.detach().requires_grad_() for leaf in leaves)
    return contexts, targets, matrix, bias


def value_and_gradients(loss, tokens):
    contexts, targets, matrix, bias = inputs(tokens)
    value = loss(contexts, targets, matrix, bias)
    return [value.detach(), *torch.autograd.grad(value, (contexts, matrix, bias))]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tokens", [9, 17, 85])
def test_rows_that_fill_a_block_count_for_nothing(loss, tokens, monkeypatch):
    assert rows_for(tokens, 10**6) > tokens
    found = value_and_gradients(loss, tokens)
    for module in (blockwise, mixture, adaptive_softmax):
        monkeypatch.setattr(module, "token_blocks", one_block_as_it_is)
    torch.testing.assert_close(found, value_and_gradients(loss, tokens))


@pytest.mark.parametrize("loss", LOSSES)
def test_no_gradient_is_computed_under_no_grad(loss, monkeypatch):
    def refused(*_, **__):
        raise AssertionError("a product for a gradient")

    with torch.no_grad():
        expected = loss(*inputs(37))
        monkeypatch.setattr(blocks, "add_matmul_transposed_", refused)
        assert torch.equal(loss(*inputs(37)), expected)
    with pytest.raises(AssertionError, match="a product for a gradient"):
        value_and_gradients(loss, 37)


@pytest.mark.parametrize("loss", LOSSES)
def test_products_have_few_shapes_whatever_the_batch(loss, monkeypatch):
    shapes = set()
    original = blocks.matmul_transposed

    def watched(left, right):
        shapes.add((left.shape, right.shape))
        return original(left, right)

    for module in (blocks, blocks):
        monkeypatch.setattr(module, "matmul_transposed", watched)
    for tokens in range(32, 64):
        value_and_gradients(loss, tokens)
    # 32, 40, 48, 56 or 64 rows, in two or three products; a cluster's few tokens have more sizes.
    few = len(shapes)
    assert few <= (2 * (5 + 2 * 12) if loss is adaptive_loss else 3 * 5)
    for module in (blockwise, mixture, adaptive_softmax):
        monkeypatch.setattr(module, "token_blocks", one_block_as_it_is)
    shapes.clear()
    for tokens in range(32, 64):
        value_and_gradients(loss, tokens)
    assert len(shapes) > 2 * few


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
