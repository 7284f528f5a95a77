"""The distribution of a mixture, and its loss where one expert takes all of the prior."""

import pytest
import torch

from spectral_fairseq.functional import blocks
from spectral_fairseq.functional.mixture_loss import log_mixture
from tests.functional.losses import LOSSES, gradients, in_float64, leaves_and_targets, relative
from tests.reference import losses as reference


@pytest.mark.parametrize("scale", [1.0, 60.0])
@pytest.mark.parametrize("bound", [1, 8 * 1024 * 1024])
def test_log_mixture_and_its_gradients(monkeypatch, scale, bound):
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", bound)
    leaves, _ = leaves_and_targets(6, 5, 31, torch.float64, scale)
    contexts, logits, matrix, bias = leaves
    shaped = contexts.view(2, 3, 3, 5)
    found = log_mixture(shaped, logits.view(2, 3, 3).log_softmax(-1), matrix, bias)
    doubles = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    expected = reference.log_mixture(doubles[0], doubles[1].log_softmax(-1), doubles[2], doubles[3])
    assert (expected.min() < -80) == (scale > 1)
    torch.testing.assert_close(found, expected.view(2, 3, 31))
    upstream = torch.randn(6, 31, dtype=torch.float64)
    (found.view(6, 31) * upstream).sum().backward()
    (expected * upstream).sum().backward()
    for leaf, double in zip(leaves, doubles):
        torch.testing.assert_close(leaf.grad, double.grad)


def test_log_mixture_is_float32_and_normalised_from_half_precision():
    leaves, _ = leaves_and_targets(dtype=torch.bfloat16)
    contexts, logits, matrix, bias = leaves
    found = log_mixture(contexts, logits.float().log_softmax(-1), matrix, bias)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.log_softmax(-1), found, atol=1e-5, rtol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("gap", [50.0, 1e4])
def test_saturated_priors(smoothing, gap):
    """One expert takes all the mass; in float32 the others' prior is zero at 1e4."""
    leaves, targets = leaves_and_targets()
    with torch.no_grad():
        leaves[1].zero_()
        leaves[1][:, 1] = gap
    exact = in_float64(leaves)
    loss = LOSSES["mixture"].fast(leaves, targets, smoothing)[0]
    expected = LOSSES["mixture"].naive(exact, targets, smoothing)[0]
    assert relative(loss, expected) < 1e-6
    h, q, w, b = zip(gradients(loss, leaves), gradients(expected, exact))
    assert all(relative(*pair) < 1e-6 for pair in (h, w, b))
    assert q[0].abs().max() < 1e-6
