"""What all losses by blocks have in common: they equal their naive forms, in every precision."""

import shutil
import weakref

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional import (
    adaptive_loss,
    block_softmaxes,
    blocks,
    consistency_loss,
    gradient_sums,
    mixture_loss,
)
from spectral_fairseq.functional.blocks import BlockScores
from spectral_fairseq.functional.consistency_loss import (
    consistency_cross_entropy,
    dense_consistency,
)
from spectral_fairseq.functional.mixture_loss import log_mixture, mixture_cross_entropy
from spectral_fairseq.functional.softmax_loss import blockwise_cross_entropy
from tests.capabilities import FLOAT16, HALF_ON_CPU, WATCHING
from tests.functional.losses import (
    LOSSES,
    PAD,
    SMOOTHED,
    Loss,
    adversarial,
    gradients,
    in_float64,
    leaves_and_targets,
    relative,
)

each_loss = pytest.mark.parametrize("name", LOSSES)
each_loss_and_smoothing = pytest.mark.parametrize("name, eps", SMOOTHED)


def check_against_naive(name, eps, leaves, targets, bounds, block=None):
    """The loss, and its gradients times 3, which are within relative errors of the naive ones."""
    found = LOSSES[name].fast(leaves, targets, eps, block)
    exact = in_float64(leaves)
    expected = LOSSES[name].naive(exact, targets, eps)
    for one, other in zip(found, expected):
        assert relative(one, other) < bounds[0]
    fast = gradients(found[0], leaves, 3)
    for leaf, gradient, other in zip(leaves, fast, gradients(expected[0], exact, 3)):
        assert gradient.dtype == leaf.dtype
        if other.norm() > 1e-9:  # one expert's prior has none
            assert relative(gradient, other) < bounds[1]
    return found, fast


@each_loss_and_smoothing
@pytest.mark.parametrize("tokens, block", [(23, None), (23, 4), (2, None), (24, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_naive_form(name, eps, tokens, block, dtype):
    leaves, targets = leaves_and_targets(tokens, dtype=dtype)
    exact = dtype == torch.float64
    bounds = (1e-12, 1e-12) if exact else [bound for bound, _ in LOSSES[name].bounds]
    found, (of_contexts, *_) = check_against_naive(name, eps, leaves, targets, bounds, block)
    if "adversarial" in name and tokens > 2:
        assert found[0].item() > 1.05 * found[1].item()
    assert of_contexts[0].eq(0).all()  # padding


@pytest.mark.slow
@each_loss_and_smoothing
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_gradcheck(name, eps, scale):
    """At scale 300 words of a mixture underflow in linear space, and log space takes over."""
    if scale > 1 and "mixture" not in name:
        pytest.skip("of mixtures alone")
    words = 53 if "adaptive" in name else 11
    leaves, targets = leaves_and_targets(5, 3, words, torch.float64)

    def loss(h, *rest):
        # eps is too small a step for scores of hundreds, so the scale is a constant of the function
        return LOSSES[name].fast((scale * h, *rest), targets, eps, 2)[0]

    assert torch.autograd.gradcheck(loss, leaves, atol=1e-4 if scale > 1 else 1e-5)


@each_loss_and_smoothing
@pytest.mark.parametrize("dtype", [torch.bfloat16, FLOAT16])
def test_half_precision_stays_near_float64(name, eps, dtype):
    leaves, targets = leaves_and_targets(dtype=dtype)
    bounds = [bound / (1 if dtype == torch.bfloat16 else 10) for _, bound in LOSSES[name].bounds]
    found, _ = check_against_naive(name, eps, leaves, targets, bounds)
    assert found[0].dtype == torch.float32


@each_loss_and_smoothing
def test_autocast_takes_products_in_bfloat16_and_sums_in_float32(name, eps):
    leaves, targets = leaves_and_targets()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = LOSSES[name].fast(leaves, targets, eps)[0]
    exact = in_float64(leaves)
    expected = LOSSES[name].naive(exact, targets, eps)[0]
    assert loss.dtype == torch.float32 and relative(loss, expected) < 2e-3
    pairs = zip(gradients(loss, leaves), gradients(expected, exact))
    errors = [relative(*pair) for pair in pairs]
    assert 1e-6 < errors[2] < 2e-2


@each_loss_and_smoothing
def test_only_ignored_targets_give_zero_and_zero_gradients(name, eps):
    leaves, targets = leaves_and_targets()
    found = LOSSES[name].fast(leaves, targets.fill_(PAD), eps)
    assert not any(one.item() for one in found)
    assert not any(one.any() for one in gradients(found[0], leaves))


@each_loss_and_smoothing
def test_frozen_inputs_get_no_gradient(name, eps):
    (h, q, w, _), targets = leaves_and_targets()
    leaves = [h, q, w.detach(), None]
    loss = LOSSES[name].fast(leaves, targets, eps)[0]
    exact = in_float64((h, q, w, torch.zeros(53)))
    expected = gradients(LOSSES[name].naive(exact, targets, eps)[0], exact)
    assert relative(gradients(loss, leaves)[0], expected[0]) < LOSSES[name].bounds[1][0]
    with torch.no_grad():
        same = LOSSES[name].fast(leaves, targets, eps)[0]
    assert same == loss and not same.requires_grad


# The naive forms of the others take the exponential of a score.
EXTREME = {
    name: loss
    for name, loss in LOSSES.items()
    if "adaptive" not in name and name != "softmax with z-loss"
}
# A target of probability one, whose lowered score is far below every other one.
EXTREME["far adversarial softmax"] = Loss(*adversarial(None, 2.0))
EXTREME["far adversarial mixture"] = Loss(*adversarial(3, 2.0))


@pytest.mark.parametrize("name", EXTREME)
@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FLOAT16])
def test_scores_of_ten_thousand_are_finite(name, eps, dtype):
    leaves, targets = leaves_and_targets(dtype=dtype, scale=3e3)
    found = EXTREME[name].fast(leaves, targets, eps)
    exact = in_float64(leaves)
    assert (exact[0] @ exact[2].t()).abs().max() > 7e3
    for one, other in zip(found, EXTREME[name].naive(exact, targets, eps)):
        assert relative(one, other) < 1e-2
    assert all(one.isfinite().all() for one in gradients(found[0], leaves))


@WATCHING
@pytest.mark.parametrize("name, eps", [case for case in SMOOTHED if case[0] != "log mixture"])
def test_no_pass_holds_all_scores(name, eps):
    """The largest tensor that either pass allocates is a block, or as large as an input."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest[0] = max(largest[0], out.numel())
            return out

    leaves, targets = leaves_and_targets(40)
    with Watch():
        gradients(LOSSES[name].fast(leaves, targets, eps, 4)[0], leaves)
    assert largest[0] <= max(4 * 3 * 53, *(leaf.numel() for leaf in leaves))


@WATCHING
@pytest.mark.parametrize("name, eps", SMOOTHED)
def test_scores_of_one_block_are_held_at_a_time(name, eps, monkeypatch):
    """Those of the block before are dropped when the next are computed, in both passes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    tokens, words, made, blocks_seen = 40, 53, [], []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            # Scores of a block, and what has their shape; log P of all tokens is a result.
            if isinstance(out, torch.Tensor) and out.dim() > 1:
                if out.size(-1) > 7 and out.numel() < tokens * words:
                    made.append(weakref.ref(out))
            return out

    own = BlockScores.rows

    def noted(self, contexts, size):
        held = [one() for one in made if one() is not None]
        assert not held, f"{len(held)} tensors of {held[0].shape}"
        blocks_seen.append(size)
        return own(self, contexts, size)

    monkeypatch.setattr(BlockScores, "rows", noted)
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 4 * 3 * words)  # log_mixture has no argument
    leaves, targets = leaves_and_targets(tokens)
    with Watch():
        gradients(LOSSES[name].fast(leaves, targets, eps, 4)[0], leaves)
    assert len(blocks_seen) > 3


def one_block_as_it_is(tokens, _block):
    return [(slice(0, tokens), tokens)] if tokens else []


def in_one_block(monkeypatch):
    for module in (block_softmaxes, mixture_loss, adaptive_loss, consistency_loss):
        monkeypatch.setattr(module, "token_blocks", one_block_as_it_is)


def value_and_gradients(name, tokens):
    leaves, targets = leaves_and_targets(tokens, dtype=torch.float64)
    value = LOSSES[name].fast(leaves, targets.clamp(min=2), 0.1)[0]
    return [value.detach(), *gradients(value, leaves)]


@each_loss
@pytest.mark.parametrize("tokens", [9, 17, 85])
def test_rows_that_fill_a_block_count_for_nothing(name, tokens, monkeypatch):
    assert blocks.rows_for(tokens, 10**6) > tokens
    found = value_and_gradients(name, tokens)
    in_one_block(monkeypatch)
    torch.testing.assert_close(found, value_and_gradients(name, tokens))


@each_loss
def test_no_gradient_is_computed_under_no_grad(name, monkeypatch):
    def refused(*_, **__):
        raise AssertionError("a product for a gradient")

    leaves, targets = leaves_and_targets(37)
    with torch.no_grad():
        expected = LOSSES[name].fast(leaves, targets, 0.1)[0]
        monkeypatch.setattr(gradient_sums, "add_matmul_transposed_", refused)
        assert torch.equal(LOSSES[name].fast(leaves, targets, 0.1)[0], expected)
    with pytest.raises(AssertionError, match="a product for a gradient"):
        value_and_gradients(name, 37)


def test_the_logs_of_an_adversarial_mixture_cost_no_gradients(monkeypatch):
    computed, original = [], mixture_loss._MixtureBlock.gradient_

    def watched(block, upstream):
        computed.append(block)
        return original(block, upstream)

    monkeypatch.setattr(mixture_loss._MixtureBlock, "gradient_", watched)
    leaves, targets = leaves_and_targets(37)
    LOSSES["adversarial mixture"].fast(leaves, targets, 0.1)
    assert len(computed) == 1  # of the loss; the plain one is a pass of its own
    with torch.no_grad():
        LOSSES["adversarial mixture"].fast(leaves, targets, 0.1)
    assert len(computed) == 1


@each_loss
def test_products_have_few_shapes_whatever_the_batch(name, monkeypatch):
    shapes = set()
    original = blocks.matmul_transposed

    def watched(left, right):
        shapes.add((left.shape, right.shape))
        return original(left, right)

    for module in (blocks, gradient_sums):
        monkeypatch.setattr(module, "matmul_transposed", watched)
    for tokens in range(32, 64):
        value_and_gradients(name, tokens)
    # 32, 40, 48, 56 or 64 rows, in two or three products; a cluster's few tokens have more sizes.
    few = len(shapes)
    assert few <= (2 * (5 + 3 * 12) if "adaptive" in name else 3 * 5)
    in_one_block(monkeypatch)
    shapes.clear()
    for tokens in range(32, 64):
        value_and_gradients(name, tokens)
    assert len(shapes) > 2 * few


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(getattr(torch, "compiler", None), "is_compiling") or not shutil.which("g++"),
    reason="torch.compile needs torch >= 2.1 and a C++ compiler",
)
@pytest.mark.parametrize(
    "name", ["softmax", "adversarial softmax", "mixture", "log mixture", "r-drop", "adaptive"]
)
def test_a_compiled_loss(name):
    """A graph break, and no crash.

    The default backend has a C++ compiler at work for seconds, so one loss gets it; the others are
    traced and differentiated as they are for it.
    """
    leaves, targets = leaves_and_targets(33)

    def loss(*leaves):
        return LOSSES[name].fast(leaves, targets)[0]

    expected = loss(*leaves)
    torch._dynamo.reset()
    backend = "inductor" if name == "softmax" else "aot_eager"
    found = torch.compile(loss, backend=backend)(*leaves)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, leaves), gradients(expected, leaves))


# What is refused. Contexts have d = 7, and the table 53 words.
CONTEXTS, TARGETS, TABLE, BIAS = torch.ones(4, 7), torch.ones(4).long(), torch.ones(53, 7), None


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"contexts": CONTEXTS[:, :5]}, r"`contexts` of shape \(\d+, 7\)"),
        ({"targets": TARGETS[1:]}, "`targets` of shape"),
        ({"bias": torch.ones(52)}, "bias"),
        *(({"margin": torch.ones(size)}, "`margin` of shape") for size in (1, 3, 5)),
        ({"label_smoothing": -0.1}, "`label_smoothing`"),
        ({"label_smoothing": 1.0}, "`label_smoothing`"),
        ({"label_smoothing": float("nan")}, "`label_smoothing`"),
        ({"label_smoothing": 0.1, "matrix": TABLE[:1]}, "two words"),
        *(({"z_loss": wrong}, "`z_loss`") for wrong in (-1.0, float("inf"), float("nan"))),
        *(({"softcap": wrong}, "`softcap`") for wrong in (-1.0, 0.0, float("inf"), float("nan"))),
    ],
)
def test_what_does_not_fit_a_softmax_is_refused(changed, message):
    given = {"contexts": CONTEXTS, "targets": TARGETS, "matrix": TABLE, **changed}
    with pytest.raises(ConfigurationError, match=message):
        blockwise_cross_entropy(**given)


def test_contexts_of_another_shape_are_refused():
    with pytest.raises(ConfigurationError, match="`log_prior`"):
        mixture_cross_entropy(torch.ones(4, 3, 7), torch.ones(4, 2), TARGETS, TABLE)
    prior = torch.ones(4, 3)
    for eps in (0.0, 0.1):
        with pytest.raises(ConfigurationError, match="`margin`"):
            options = {"margin": torch.ones(4, 2), "label_smoothing": eps}
            mixture_cross_entropy(torch.ones(4, 3, 7), prior, TARGETS, TABLE, **options)
    with pytest.raises(ConfigurationError, match="`log_prior`"):
        log_mixture(torch.ones(2, 4, 3, 7), torch.ones(4, 2, 3), TABLE)
    with pytest.raises(ConfigurationError, match="`bias`"):
        log_mixture(torch.ones(4, 3, 7), prior, TABLE, torch.ones(1))
    with pytest.raises(ConfigurationError, match="`targets`"):
        dense_consistency(torch.ones(4, 2, 53), TARGETS[:1], weight=1.0)
    with pytest.raises(ConfigurationError, match=r"`contexts` of shape \(\d+, 2, \d+\)"):
        consistency_cross_entropy(CONTEXTS, TARGETS, TABLE, weight=1.0)
    with pytest.raises(ConfigurationError, match=r"\(4, 2\)"):
        adaptive_loss.adaptive_cross_entropy(
            CONTEXTS, torch.ones(4, 3), TARGETS, TABLE, BIAS, (5, 20)
        )


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [PAD, -100])
def test_the_dense_loss_of_two_passes_is_that_of_the_blocks(ignored, eps):
    (h, _, w, b), targets = leaves_and_targets(dtype=torch.float64)
    targets = targets.masked_fill(targets == PAD, ignored)
    given = {"weight": 0.7, "label_smoothing": eps, "ignore_index": ignored}
    found = consistency_cross_entropy(h[:, :2], targets, w, b, **given)
    dense = dense_consistency((h[:, :2] @ w.t() + b).log_softmax(-1), targets, **given)
    for name in found._fields:
        torch.testing.assert_close(getattr(dense, name).sum(), getattr(found, name))
    leaves = (h, w, b)
    torch.testing.assert_close(
        torch.autograd.grad(dense.loss.sum(), leaves), torch.autograd.grad(found.loss, leaves)
    )


@HALF_ON_CPU
def test_float16_gradients_below_its_range_survive_loss_scaling():
    h = torch.tensor([[0.0, 0.0, 18.5, 0.0]]).half()
    w, b = torch.eye(4)[:3].half(), torch.zeros(3).half().requires_grad_()
    loss = blockwise_cross_entropy(h, torch.tensor([2]), w, b).loss
    (loss * 2.0**14).backward()
    expected = 2.0**14 * torch.exp(torch.tensor(-18.5))
    assert b.grad[0] == pytest.approx(expected.item(), rel=2e-3)
