"""The blockwise losses with lowered target scores, against the worst perturbation in float64."""

import pytest
import torch

from spectral_fairseq.functional.mixture_loss import adversarial_mixture_cross_entropy
from spectral_fairseq.functional.products import row_norms
from spectral_fairseq.functional.softmax_loss import (
    adversarial_blockwise_cross_entropy,
    adversarial_margin,
)
from tests.capabilities import FLOAT16, HALF_ON_CPU
from tests.functional.losses.test_mixture import PAD, inputs, relative
from tests.reference import mixture as reference

EPSILON = 0.2


def naive(leaves, targets, epsilon, smoothing):
    """(loss, plain loss, plain NLL), and the gradients of the first."""
    leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    contexts, logits, matrix, bias = leaves
    log_prior = logits.log_softmax(-1)
    lowered = reference.adversarial_log_mixture(contexts, log_prior, targets, matrix, epsilon, bias)
    loss, _ = reference.smoothed_nll(lowered, targets, smoothing, PAD)
    plain = reference.log_mixture(contexts, log_prior, matrix, bias)
    gradients = torch.autograd.grad(loss, leaves)
    return (loss, *reference.smoothed_nll(plain, targets, smoothing, PAD)), gradients


def blockwise(leaves, targets, epsilon, smoothing, block=None):
    contexts, logits, matrix, bias = leaves
    prior = logits if logits.dtype == torch.float64 else logits.float()
    norms = row_norms(matrix[targets]).unsqueeze(1)  # [T, 1]
    return adversarial_mixture_cross_entropy(
        contexts,
        prior.log_softmax(-1),
        targets,
        matrix,
        adversarial_margin(contexts, norms, targets.unsqueeze(1), epsilon),
        bias,
        label_smoothing=smoothing,
        ignore_index=PAD,
        block_elements=block,
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("experts,tokens,block", [(1, 23, None), (3, 23, 4 * 3 * 53), (3, 2, 1)])
def test_losses_and_gradients_equal_the_naive_form(smoothing, experts, tokens, block):
    leaves, targets = inputs(tokens, experts)
    found = blockwise(leaves, targets, EPSILON, smoothing, block)
    (3 * found.loss).backward()
    expected, gradients = naive(leaves, targets, EPSILON, smoothing)
    for fast, slow in zip(found, expected):
        assert relative(fast, slow) < 1e-6
    assert found.loss.item() > 1.05 * found.plain_loss.item()
    for leaf, gradient in zip(leaves, gradients):
        if gradient.norm() > 1e-9:  # one expert's prior has none
            assert relative(leaf.grad, 3 * gradient) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_gradcheck(smoothing, scale):
    """At scale 300 words underflow in linear space, and log space takes over."""
    leaves, targets = inputs(5, 3, 3, 11, torch.float64)

    def loss(contexts, *rest):
        return blockwise((scale * contexts, *rest), targets, EPSILON, smoothing, 2 * 33).loss

    assert torch.autograd.gradcheck(loss, leaves, atol=1e-4 if scale > 1 else 1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    "dtype,limit",
    [(torch.bfloat16, 2e-2), pytest.param(torch.float16, 2e-3, marks=HALF_ON_CPU)],
)
def test_half_precision_stays_near_float64(dtype, limit, smoothing):
    leaves, targets = inputs(dtype=dtype)
    found = blockwise(leaves, targets, EPSILON, smoothing)
    found.loss.backward()
    expected, gradients = naive(leaves, targets, EPSILON, smoothing)
    assert found.loss.dtype == torch.float32
    for fast, slow in zip(found, expected):
        assert relative(fast, slow) < limit
    for leaf, gradient in zip(leaves, gradients):
        assert leaf.grad.dtype == dtype
        assert relative(leaf.grad, gradient) < limit


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FLOAT16])
def test_margins_of_thousands_are_finite(dtype, smoothing):
    """A target of probability one, whose lowered score is far below every other one."""
    leaves, targets = inputs(dtype=dtype, scale=3e3)
    found = blockwise(leaves, targets, 2.0, smoothing)
    found.loss.backward()
    expected, _ = naive(leaves, targets, 2.0, smoothing)
    for fast, slow in zip(found, expected):
        assert relative(fast, slow) < 1e-2
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_expert_is_a_single_softmax(smoothing):
    """The blockwise softmax, whose label smoothing takes no pass over the scores, agrees."""
    leaves, targets = inputs(experts=1, dtype=torch.float64)
    mixed = blockwise(leaves, targets, EPSILON, smoothing, 4 * 53)
    expected = torch.autograd.grad(mixed.loss, [leaves[0], *leaves[2:]])
    contexts, _, matrix, bias = leaves
    single = adversarial_blockwise_cross_entropy(
        contexts.squeeze(1),
        targets,
        matrix,
        adversarial_margin(contexts.squeeze(1), row_norms(matrix[targets]), targets, EPSILON),
        bias,
        label_smoothing=smoothing,
        ignore_index=PAD,
        block_elements=4 * 53,
    )
    torch.testing.assert_close(tuple(single), tuple(mixed))
    torch.testing.assert_close(torch.autograd.grad(single.loss, [leaves[0], *leaves[2:]]), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_evaluation_without_gradients_and_batches_of_padding(smoothing):
    leaves, targets = inputs()
    with torch.no_grad():
        found = blockwise(leaves, targets, EPSILON, smoothing)
    expected, _ = naive(leaves, targets, EPSILON, smoothing)
    assert relative(found.loss, expected[0]) < 1e-6
    empty = blockwise(leaves, targets.fill_(PAD), EPSILON, smoothing)
    empty.loss.backward()
    assert all(part.item() == 0 for part in empty)
    assert all(leaf.grad.eq(0).all() for leaf in leaves)
