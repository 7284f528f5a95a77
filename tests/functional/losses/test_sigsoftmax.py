import pytest
import torch

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.softmax_loss import sigsoftmax_cross_entropy, sigsoftmax_scores
from tests.capabilities import FLOAT16, HALF_ON_CPU
from tests.reference.mixture import smoothed_nll

TOKENS, WORDS, DIM, PAD = 23, 17, 5, 1


def naive_log_p(contexts, matrix, bias=None):
    """log (exp(z_v) sigmoid(z_v) / sum_u exp(z_u) sigmoid(z_u)), written as in the paper."""
    logits = torch.nn.functional.linear(contexts, matrix, bias)
    masses = logits.exp() * torch.sigmoid(logits)
    return (masses / masses.sum(-1, keepdim=True)).log()


def operands(dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, DIM), (WORDS, DIM), (WORDS,)][: 3 if bias else 2]
    found = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    targets = torch.randint(2, WORDS, (TOKENS,), generator=generator)
    targets[[3, 22]] = PAD
    return targets, [one.requires_grad_() for one in found]


@pytest.mark.parametrize("block_elements", [None, 2 * WORDS])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
def test_blockwise_loss_and_gradients_are_the_papers(bias, label_smoothing, block_elements):
    targets, (contexts, matrix, *rest) = operands(bias=bias)
    loss, nll = sigsoftmax_cross_entropy(
        contexts,
        targets,
        matrix,
        *rest,
        label_smoothing=label_smoothing,
        ignore_index=PAD,
        block_elements=block_elements,
    )
    log_p = naive_log_p(contexts, matrix, *rest)
    expected, expected_nll = smoothed_nll(log_p, targets, label_smoothing, PAD)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(nll, expected_nll.detach())
    assert not nll.requires_grad
    leaves = (contexts, matrix, *rest)
    for found, wanted in zip(
        torch.autograd.grad(3 * loss, leaves), torch.autograd.grad(3 * expected, leaves)
    ):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [FLOAT16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    targets, leaves = operands(dtype)
    loss, _ = sigsoftmax_cross_entropy(leaves[0], targets, *leaves[1:])
    log_p = naive_log_p(*(one.double() for one in leaves))
    assert loss.dtype == torch.float32
    expected, _ = smoothed_nll(log_p, targets)
    torch.testing.assert_close(loss.double(), expected, rtol=2e-2, atol=0)
    loss.backward()
    assert all(one.grad.dtype == dtype and one.grad.isfinite().all() for one in leaves)


def test_extreme_logits_are_finite():
    logits = torch.tensor([-1e4, -50.0, 0.0, 50.0, 1e4])
    expected = torch.tensor([-2e4, -100.0, -0.6931, 50.0, 1e4])
    torch.testing.assert_close(sigsoftmax_scores(logits), expected, rtol=1e-4, atol=1e-4)


def test_a_batch_of_padding_has_no_loss_and_a_gradient_of_zero():
    targets, leaves = operands()
    contexts, matrix, bias = leaves
    loss, nll = sigsoftmax_cross_entropy(
        contexts, torch.full_like(targets, PAD), matrix, bias, ignore_index=PAD
    )
    loss.backward()
    assert float(loss.detach()) == float(nll) == 0
    assert not any(one.grad.any() for one in leaves)


@HALF_ON_CPU
def test_half_precision_contexts_whose_sum_overflows():
    contexts = torch.full((1024, 256), 0.3)
    matrix, targets = torch.zeros(5, 256), torch.zeros(1024, dtype=torch.long)
    expected, _ = sigsoftmax_cross_entropy(contexts, targets, matrix)
    found, _ = sigsoftmax_cross_entropy(contexts.half(), targets, matrix.half())
    torch.testing.assert_close(found, expected)


def test_bad_input_is_refused():
    targets, (contexts, matrix, bias) = operands()
    with pytest.raises(ConfigurationError, match="label_smoothing"):
        sigsoftmax_cross_entropy(contexts, targets, matrix, label_smoothing=1.0)
    with pytest.raises(ConfigurationError, match="bias"):
        sigsoftmax_cross_entropy(contexts, targets, matrix, bias[1:])
