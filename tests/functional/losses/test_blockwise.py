"""The blockwise cross entropy of one softmax, and the matrix product under it."""

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional import products
from spectral_fairseq.functional.blocks import softmax_
from spectral_fairseq.functional.softmax_loss import blockwise_cross_entropy
from tests.capabilities import FLOAT16, HALF_ON_CPU
from tests.reference import mixture as reference

PAD = 1


def inputs(tokens=23, dim=7, words=53, dtype=torch.float32, scale=1.0):
    torch.manual_seed(3)
    contexts = (scale * torch.randn(tokens, dim)).to(dtype).requires_grad_()
    matrix = torch.randn(words, dim).to(dtype).requires_grad_()
    bias = torch.randn(words).to(dtype).requires_grad_()
    targets = torch.randint(2, words, (tokens,))
    targets[::5] = PAD
    return contexts, targets, matrix, bias


def naive(contexts, targets, matrix, bias, smoothing):
    leaves = [t.detach().double().requires_grad_() for t in (contexts, matrix, bias)]
    log_p = torch.log_softmax(leaves[0] @ leaves[1].t() + leaves[2], -1)
    loss, nll = reference.smoothed_nll(log_p, targets, smoothing, PAD)
    loss.backward()
    return loss, nll, [leaf.grad for leaf in leaves]


def relative(found, expected):
    expected = expected.detach()
    return float((found.detach().double() - expected).norm() / expected.norm().clamp_min(1e-12))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("tokens,block", [(23, None), (23, 53 * 4), (1, None), (24, 1)])
def test_equals_the_naive_form_in_float64(smoothing, tokens, block):
    contexts, targets, matrix, bias = inputs(tokens + 1)
    loss, nll = blockwise_cross_entropy(
        contexts,
        targets,
        matrix,
        bias,
        label_smoothing=smoothing,
        ignore_index=PAD,
        block_elements=block,
    )
    (3 * loss).backward()
    expected_loss, expected_nll, gradients = naive(contexts, targets, matrix, bias, smoothing)
    assert relative(loss, expected_loss) < 1e-6
    assert relative(nll, expected_nll) < 1e-6
    for leaf, gradient in zip((contexts, matrix, bias), gradients):
        assert relative(leaf.grad, 3 * gradient) < 1e-6
    assert contexts.grad[0].eq(0).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradcheck(smoothing):
    contexts, targets, matrix, bias = inputs(5, 3, 11, torch.float64)

    def loss(*leaves):
        return blockwise_cross_entropy(
            leaves[0],
            targets,
            *leaves[1:],
            label_smoothing=smoothing,
            ignore_index=PAD,
            block_elements=22,
        )[0]

    assert torch.autograd.gradcheck(loss, (contexts, matrix, bias))


def test_only_ignored_targets_give_zero_and_zero_gradients():
    contexts, targets, matrix, bias = inputs()
    targets.fill_(PAD)
    loss, nll = blockwise_cross_entropy(
        contexts, targets, matrix, bias, label_smoothing=0.1, ignore_index=PAD
    )
    loss.backward()
    assert loss.item() == nll.item() == 0
    for leaf in (contexts, matrix, bias):
        assert leaf.grad.eq(0).all()


def test_frozen_inputs_get_no_gradient():
    contexts, targets, matrix, bias = inputs()
    loss, _ = blockwise_cross_entropy(
        contexts, targets, matrix.detach(), None, label_smoothing=0.1, ignore_index=PAD
    )
    loss.backward()
    _, _, gradients = naive(contexts, targets, matrix, torch.zeros(53), 0.1)
    assert relative(contexts.grad, gradients[0]) < 1e-6
    with torch.no_grad():
        same, _ = blockwise_cross_entropy(
            contexts, targets, matrix, None, label_smoothing=0.1, ignore_index=PAD
        )
    assert same == loss


@pytest.mark.parametrize(
    "dtype,limit", [(torch.bfloat16, 2e-2), pytest.param(torch.float16, 2e-3, marks=HALF_ON_CPU)]
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_half_precision_stays_near_float64(dtype, limit, smoothing):
    contexts, targets, matrix, bias = inputs(dtype=dtype)
    loss, _ = blockwise_cross_entropy(
        contexts, targets, matrix, bias, label_smoothing=smoothing, ignore_index=PAD
    )
    loss.backward()
    expected, _, gradients = naive(contexts, targets, matrix, bias, smoothing)
    assert loss.dtype == torch.float32
    assert relative(loss, expected) < limit
    for leaf, gradient in zip((contexts, matrix, bias), gradients):
        assert leaf.grad.dtype == dtype
        assert relative(leaf.grad, gradient) < limit


@HALF_ON_CPU
def test_float16_gradients_below_its_range_survive_loss_scaling():
    contexts, targets, matrix, bias = inputs(1, 4, 3, torch.float16)
    targets = targets.new_tensor([2])
    with torch.no_grad():
        matrix.copy_(torch.eye(4)[:3])
        bias.zero_()
        contexts.copy_(torch.tensor([[0.0, 0.0, 18.5, 0.0]]))
    loss, _ = blockwise_cross_entropy(contexts, targets, matrix, bias)
    (loss * 2.0**14).backward()
    expected = 2.0**14 * torch.exp(torch.tensor(-18.5))
    assert bias.grad[0] == pytest.approx(expected.item(), rel=2e-3)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FLOAT16])
def test_scores_of_ten_thousand_are_finite(dtype, smoothing):
    contexts, targets, matrix, bias = inputs(dtype=dtype, scale=1e3)
    loss, nll = blockwise_cross_entropy(
        contexts, targets, matrix, bias, label_smoothing=smoothing, ignore_index=PAD
    )
    loss.backward()
    scores = contexts.detach().double() @ matrix.detach().double().t()
    assert scores.abs().max() > 7e3
    expected, _, _ = naive(contexts, targets, matrix, bias, smoothing)
    assert relative(loss, expected) < 1e-2
    assert all(leaf.grad.isfinite().all() for leaf in (contexts, matrix, bias))


def test_softmax_overwrites_the_scores():
    scores = torch.randn(5, 4097) * 30
    probabilities, log_z = torch.softmax(scores, -1), torch.logsumexp(scores, -1)
    torch.testing.assert_close(softmax_(scores), log_z)
    torch.testing.assert_close(scores, probabilities)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_product_with_transposed_views(rows):
    torch.manual_seed(0)
    left, right = torch.randn(rows, 13), torch.randn(5, 13)
    for a, b in ((left, right), (left.t().contiguous().t(), right.t().contiguous().t())):
        found = products.matmul_transposed(a, b)
        torch.testing.assert_close(found, left @ right.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [3, 40])  # fewer than half of the width, and more
def test_product_that_is_added_with_transposed_factors(tokens):
    torch.manual_seed(0)
    scores, rows, total = torch.randn(tokens, 30), torch.randn(tokens, 12), torch.randn(30, 12)
    expected = total.double() + 0.5 * (scores.double().t() @ rows.double())
    products.add_matmul_transposed_(total, scores.t(), rows.t(), alpha=0.5)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_loss_does_without_the_onednn_operator(monkeypatch):
    contexts, targets, matrix, bias = inputs()
    monkeypatch.setattr(products, "_ONEDNN_LINEAR", None)
    loss, _ = blockwise_cross_entropy(contexts, targets, matrix, bias, ignore_index=PAD)
    loss.backward()
    expected, _, gradients = naive(contexts, targets, matrix, bias, 0.0)
    assert relative(loss, expected) < 1e-6
    assert relative(matrix.grad, gradients[1]) < 1e-6


def test_sizes_and_smoothing_are_checked():
    contexts, targets, matrix, bias = inputs()
    with pytest.raises(ConfigurationError, match="d = 7"):
        blockwise_cross_entropy(contexts[:, :5], targets, matrix)
    with pytest.raises(ConfigurationError, match="one target"):
        blockwise_cross_entropy(contexts, targets[1:], matrix)
    with pytest.raises(ConfigurationError, match="bias"):
        blockwise_cross_entropy(contexts, targets, matrix, bias[1:])
    for smoothing in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigurationError, match="`label_smoothing`"):
            blockwise_cross_entropy(contexts, targets, matrix, label_smoothing=smoothing)
    with pytest.raises(ConfigurationError, match="two words"):
        blockwise_cross_entropy(contexts, targets, matrix[:1], label_smoothing=0.1)
