"""Log-probabilities, entropies, hits and weights of tokens equal those of the dense scores."""

import weakref
from collections import Counter

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional import blocks, gradient_sums
from spectral_fairseq.functional.block_softmaxes import BlockSoftmaxes
from spectral_fairseq.functional.log_probs import blockwise_log_probs
from spectral_fairseq.functional.softmax_loss import (
    blockwise_cross_entropy,
    measured_cross_entropy,
)
from tests.reference.losses import smoothed_nll

OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.2},
    "z-loss": {"z_loss": 0.1},
    "cap": {"softcap": 2.0},
    "all": {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 2.0},
}


def problem(tokens=23, words=17, dim=5, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    drawn = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).mul(scale).to(dtype)
        for shape in ((tokens, dim), (words, dim), (words,))
    )
    contexts, matrix, bias = (one.requires_grad_() for one in drawn)
    targets = torch.randint(1, words, (tokens,), generator=generator)
    with torch.no_grad():  # some tokens are right
        contexts[::3] += 3 * matrix[targets[::3]]
    targets[[2, 7, 22]] = 0
    return contexts, targets, matrix, bias


def dense_scores(contexts, matrix, bias, softcap=None):
    scores = contexts @ matrix.t() + (0 if bias is None else bias)
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def dense_measures(scores, targets):
    log_p = scores.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, targets.unsqueeze(1)).squeeze(1), entropy, scores.argmax(-1).eq(targets)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("by_probability", [True, False])
@pytest.mark.parametrize("block_elements", [17, 5 * 17, None])
def test_by_products_and_weights(name, with_bias, by_probability, block_elements):
    contexts, targets, matrix, bias = problem()
    bias = bias if with_bias else None
    options = OPTIONS[name]
    inputs = [one for one in (contexts, matrix, bias) if one is not None]
    weights = torch.linspace(-0.5, 3, len(targets), dtype=torch.float64)
    found, tokens = measured_cross_entropy(
        contexts, targets, matrix, bias, **options, weights=weights, by_probability=by_probability,
        ignore_index=0, block_elements=block_elements,
    )  # fmt: skip
    scores = dense_scores(contexts, matrix, bias, options.get("softcap"))
    log_p, entropy, right = dense_measures(scores, targets)
    counted = targets.ne(0)
    for mine, dense in zip(tokens, (log_p, entropy, right)):
        assert not mine[~counted].any() and not mine.requires_grad
        torch.testing.assert_close(mine[counted], dense[counted].detach(), rtol=0, atol=1e-9)
    assert tokens.correct.any() and not tokens.correct[counted].all()
    share = weights * (log_p.detach().exp() if by_probability else 1)
    smoothing = options.get("label_smoothing", 0)
    costs = torch.stack(
        [
            smoothed_nll(row.log_softmax(-1)[None], target[None], smoothing)[0]
            + options.get("z_loss", 0) * row.logsumexp(-1).square()
            for row, target in zip(scores, targets)
        ]
    ).flatten()
    expected = (share * costs)[counted].sum()
    torch.testing.assert_close(found.loss, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.nll, -log_p[counted].sum().detach(), rtol=1e-9, atol=1e-9)
    mine = torch.autograd.grad(found.loss, inputs)
    for one, dense in zip(mine, torch.autograd.grad(expected, inputs)):
        torch.testing.assert_close(one, dense, rtol=1e-8, atol=1e-9)
    # Alone, with and without weights, it is the same loss.
    for given in ({}, {"weights": weights, "by_probability": by_probability}):
        alone = blockwise_cross_entropy(
            contexts, targets, matrix, bias, **options, **given, ignore_index=0
        )
        measured, _ = measured_cross_entropy(
            contexts, targets, matrix, bias, **options, **given, ignore_index=0
        )
        for one, other in zip(alone, measured):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("block_elements", [17, 5 * 17, None])
@pytest.mark.parametrize("frozen", ["", "matrix", "matrix bias", "contexts", "bias"])
def test_a_loss_that_is_a_function_of_log_probabilities(softcap, with_bias, block_elements, frozen):
    """As that of GRPO: clipped ratios to the policy that drew the tokens, times an advantage."""
    contexts, targets, matrix, bias = problem()
    given = {"contexts": contexts, "matrix": matrix, "bias": bias if with_bias else None}
    for name in frozen.split():
        given[name] = None if given[name] is None else given[name].detach()
    contexts, matrix, bias = given.values()
    inputs = [one for one in given.values() if one is not None and one.requires_grad]
    old = torch.linspace(-4, -1, len(targets), dtype=torch.float64)
    advantages = torch.linspace(-2, 2, len(targets), dtype=torch.float64)

    def loss(log_probs):
        ratio = (log_probs - old).exp()
        surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return -surrogate[targets.ne(0)].mean()

    found = blockwise_log_probs(
        contexts, targets, matrix, bias, softcap=softcap, ignore_index=0,
        block_elements=block_elements,
    )  # fmt: skip
    dense = dense_measures(dense_scores(contexts, matrix, bias, softcap), targets)
    counted = targets.ne(0)
    for mine, one in zip(found, dense):
        torch.testing.assert_close(mine[counted], one[counted], rtol=0, atol=1e-9)
    assert not found.entropy.requires_grad
    gradients = torch.autograd.grad(loss(found.log_probs), inputs)
    for mine, one in zip(gradients, torch.autograd.grad(loss(dense[0]), inputs)):
        torch.testing.assert_close(mine, one, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
@pytest.mark.parametrize("few", [1, 3, 100])
def test_sums_over_words_are_in_float32(dtype, close, few, monkeypatch):
    """Of products in bfloat16 too, whose softmax is narrow again when it is multiplied out."""
    monkeypatch.setattr("spectral_fairseq.functional.token_measures.CACHED_SCORES", few * 300)
    contexts, targets, matrix, _ = problem(40, 300, 16, dtype)
    _, tokens = measured_cross_entropy(contexts, targets, matrix, block_elements=12 * 300)
    with torch.no_grad():
        scores = contexts @ matrix.t()  # rounded as the products of a block are
        dense = dense_measures(scores.double(), targets)
    assert tokens.entropy.dtype == torch.float32
    torch.testing.assert_close(tokens.log_probs.double(), dense[0], rtol=close, atol=close)
    torch.testing.assert_close(tokens.entropy.double(), dense[1], rtol=close, atol=close)
    assert torch.equal(tokens.correct, scores.max(-1).values.eq(
        scores.gather(1, targets.unsqueeze(1)).squeeze(1)
    ))  # fmt: skip
    alone = blockwise_log_probs(contexts, targets, matrix, block_elements=12 * 300)
    assert all(torch.equal(one, other) for one, other in zip(alone, tokens))


def test_words_that_cannot_come_and_no_tokens_at_all():
    contexts, targets, matrix, bias = problem()
    with torch.no_grad():
        bias[16] = -torch.inf
    targets[targets == 16] = 3
    _, found = measured_cross_entropy(contexts, targets, matrix, bias)
    keep = slice(0, 16)
    dense = dense_measures(dense_scores(contexts, matrix[keep], bias[keep]), targets)
    for mine, one in zip(found, dense):
        torch.testing.assert_close(mine, one.detach(), rtol=0, atol=1e-9)
    nothing = torch.zeros(4, dtype=torch.long)
    none, tokens = measured_cross_entropy(
        contexts[:4], nothing, matrix, ignore_index=0, weights=torch.ones(4)
    )
    assert float(none.loss) == 0 and not any(one.any() for one in tokens)
    alone = blockwise_log_probs(contexts[:4], nothing, matrix, ignore_index=0).log_probs
    alone.sum().backward()
    assert not contexts.grad.any()


def test_scores_that_are_no_numbers_have_no_measures():
    """An infinite or undefined score of one word must not be left out of a sum."""
    contexts, targets, matrix, bias = problem()
    for value in (torch.nan, torch.inf):
        with torch.no_grad():
            bias[16] = value
        _, found = measured_cross_entropy(contexts, targets, matrix, bias)
        assert found.entropy.isnan().all() and found.log_probs.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measures_cost_three_passes_over_the_scores(dtype):
    """Weights cost none, and neither does whether a target is right."""
    contexts, targets, matrix, _ = problem(24, 300, 16, dtype)
    # What reads no number. torch 1.12 now and then lists one of them, resolve_conj, once more.
    others = ("split", "slice", "narrow", "as_strided", "detach", "alias", "new_empty", "conj")

    def passes(compute, **options):
        with torch.autograd.profiler.profile(record_shapes=True) as profile:
            compute(contexts, targets, matrix, block_elements=12 * 300, **options)
        touching = (
            event.name
            for event in profile.function_events
            if [12, 300] in event.input_shapes and not event.name.endswith(others)
        )
        return Counter(touching)

    alone = passes(blockwise_cross_entropy)
    weights = {"weights": torch.ones(len(targets)), "by_probability": True}
    assert passes(blockwise_cross_entropy, **weights) == alone and sum(alone.values()) > 4
    further = passes(measured_cross_entropy) - alone
    assert further == {f"aten::{name}": 2 for name in ("sub", "mul_", "nansum")}


def test_no_pass_holds_tokens_times_words(monkeypatch):
    """Every tensor that is made has at most the size of a block, or of the table."""
    sizes = []
    for name in ("new_empty", "new_zeros"):
        own = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name,
            lambda self, *given, own=own, **more: (
                sizes.append(own(self, *given, **more).numel()), own(self, *given, **more)
            )[1],
        )  # fmt: skip
    products = blocks.matmul_transposed

    def noted(one, other):
        result = products(one, other)
        sizes.append(result.numel())
        return result

    for module in (blocks, gradient_sums):
        monkeypatch.setattr(module, "matmul_transposed", noted)
    contexts, targets, matrix, _ = problem(200, 50, 4)
    measured_cross_entropy(contexts, targets, matrix, block_elements=8 * 50)
    blockwise_log_probs(contexts, targets, matrix, block_elements=8 * 50).log_probs.sum().backward()
    assert max(sizes) <= max(8 * 50, 200 * 4)


@pytest.mark.parametrize("frozen, blocks_computed", [(True, 3), (False, 6)])
def test_scores_of_one_block_are_held_at_a_time(frozen, blocks_computed, monkeypatch):
    """Those of the block before are dropped when the next are computed, in both passes."""
    contexts, targets, matrix, _ = problem(24, 50, 4)
    matrix.requires_grad_(not frozen)
    held = []
    own = BlockSoftmaxes.block

    def noted(self, part, size):
        assert not any(softmax() is not None for softmax in held)
        block = own(self, part, size)
        held.append(weakref.ref(block.softmax))
        return block

    monkeypatch.setattr(BlockSoftmaxes, "block", noted)
    found = blockwise_log_probs(contexts, targets, matrix, block_elements=8 * 50)
    found.log_probs.sum().backward()
    assert len(held) == blocks_computed


@pytest.mark.parametrize("frozen, products", [(False, 4), (True, 2)])
def test_log_probabilities_cost_a_fourth_product_where_the_table_is_trained(
    frozen, products, monkeypatch
):
    contexts, targets, matrix, _ = problem()
    matrix.requires_grad_(not frozen)
    made = []

    def counted(own):
        return lambda *args, **more: (made.append(own), own(*args, **more))[1]

    monkeypatch.setattr(blocks, "matmul_transposed", counted(blocks.matmul_transposed))
    for name in ("matmul_transposed", "add_matmul_transposed_"):
        monkeypatch.setattr(gradient_sums, name, counted(getattr(gradient_sums, name)))
    found = blockwise_log_probs(contexts, targets, matrix).log_probs
    found.sum().backward()
    assert len(made) == products


@pytest.mark.parametrize("trained", [True, False])
def test_log_probabilities_compute_no_gradient_that_is_not_kept(trained):
    """Not for the soft cap either: of a trained table, or where no gradient is asked for."""
    contexts, targets, matrix, _ = problem()
    with torch.set_grad_enabled(trained), torch.autograd.profiler.profile() as profile:
        blockwise_log_probs(contexts, targets, matrix, softcap=2.0)
    names = {event.name for event in profile.function_events}
    assert "aten::gather" in names and "aten::scatter_add_" not in names


def test_weights_that_cannot_be_taken_are_refused():
    contexts, targets, matrix, _ = problem()
    for weights, match in (
        (torch.ones(3), "`weights` of shape"),
        (torch.ones(len(targets), requires_grad=True), "blockwise_log_probs"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            blockwise_cross_entropy(contexts, targets, matrix, weights=weights)
