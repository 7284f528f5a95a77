"""The loss of two passes, blockwise and dense, against the papers' formulas in float64."""

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.consistency_loss import (
    consistency_cross_entropy,
    dense_consistency,
)
from tests.reference import consistency as reference

PAD, ALPHA = 1, 3.0


def inputs(tokens=24, dim=7, words=53, dtype=torch.float64):
    torch.manual_seed(3)
    contexts = torch.randn(tokens, 2, dim, dtype=dtype).requires_grad_()
    matrix = torch.randn(words, dim, dtype=dtype).requires_grad_()
    bias = torch.randn(words, dtype=dtype).requires_grad_()
    targets = torch.randint(2, words, (tokens,))
    targets[::5] = PAD
    return contexts, targets, matrix, bias


def naive(contexts, targets, matrix, bias, symmetric, smoothing):
    """(objective, NLL, gradients), the objective scaled as that of the package."""
    leaves = [t.detach().double().requires_grad_() for t in (contexts, matrix, bias)]
    log_p = torch.log_softmax(leaves[0] @ leaves[1].t() + leaves[2], -1)
    form = reference.r_drop if symmetric else reference.simcut
    loss, nll = form(*log_p.unbind(1), targets, ALPHA, smoothing, PAD)
    loss = loss / 2 if symmetric else loss
    return loss, nll, torch.autograd.grad(loss, leaves)


def weight_of(symmetric):
    return ALPHA / 2 if symmetric else ALPHA


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("tokens,block", [(24, None), (24, 53 * 8), (2, 1)])
def test_equals_the_papers_objective(tokens, block, symmetric, smoothing):
    contexts, targets, matrix, bias = inputs(tokens)
    options = {"symmetric": symmetric, "label_smoothing": smoothing, "ignore_index": PAD}
    found = consistency_cross_entropy(
        *(contexts, targets, matrix, bias),
        weight=weight_of(symmetric),
        block_elements=block,
        **options,
    )
    expected, nll, gradients = naive(contexts, targets, matrix, bias, symmetric, smoothing)
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(found.nll, nll)
    torch.testing.assert_close(
        found.likelihood + weight_of(symmetric) * found.divergence, expected.detach()
    )
    for gradient, want in zip(
        torch.autograd.grad(2 * found.loss, (contexts, matrix, bias)), gradients
    ):
        torch.testing.assert_close(gradient, 2 * want)
    log_p = torch.log_softmax(contexts @ matrix.t() + bias, -1)
    dense = dense_consistency(log_p, targets, weight=weight_of(symmetric), **options)
    for name in found._fields:
        torch.testing.assert_close(getattr(dense, name).sum(), getattr(found, name))
    torch.testing.assert_close(torch.autograd.grad(dense.loss.sum(), matrix)[0], gradients[1])


@pytest.mark.parametrize("symmetric", [True, False])
def test_gradcheck(symmetric):
    contexts, targets, matrix, bias = inputs(5, 3, 11)

    def loss(*leaves):
        return consistency_cross_entropy(
            *(leaves[0], targets, *leaves[1:]),
            weight=0.7,
            symmetric=symmetric,
            label_smoothing=0.1,
            ignore_index=PAD,
            block_elements=44,
        ).loss

    assert torch.autograd.gradcheck(loss, (contexts, matrix, bias))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_narrow_types_stay_near_float64(dtype, limit, symmetric):
    leaves = [t.detach().to(dtype) for t in inputs() if t.requires_grad]
    contexts, matrix, bias = (t.requires_grad_() for t in leaves)
    targets = inputs()[1]
    found = consistency_cross_entropy(
        *(contexts, targets, matrix, bias),
        weight=weight_of(symmetric),
        symmetric=symmetric,
        ignore_index=PAD,
    )
    expected, _, gradients = naive(contexts, targets, matrix, bias, symmetric, 0.0)
    assert abs(float(found.loss.detach() / expected.detach()) - 1) < limit
    found.loss.backward()
    for leaf, want in zip((contexts, matrix, bias), gradients):
        assert leaf.grad.dtype == dtype
        assert float((leaf.grad.double() - want).norm() / want.norm()) < limit


def test_equal_passes_do_not_differ():
    contexts, targets, matrix, _ = inputs()
    contexts = contexts.detach()[:, :1].expand(-1, 2, -1)
    with torch.no_grad():
        found = consistency_cross_entropy(contexts, targets, matrix, weight=9.0, symmetric=True)
    assert abs(float(found.divergence)) < 1e-12 and not found.loss.requires_grad


def test_one_context_a_token_is_refused():
    contexts, targets, matrix, _ = inputs()
    with pytest.raises(ConfigurationError, match=r"`contexts` of shape \(\d+, 2, \d+\)"):
        consistency_cross_entropy(contexts[:, 0], targets, matrix, weight=1.0, symmetric=True)
