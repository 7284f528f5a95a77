"""Losses by blocks under ``torch.compile`` with its default backend: a graph break, no crash."""

import shutil

import pytest
import torch

from spectral_fairseq.functional import adaptive_loss, consistency_loss, mixture_loss, softmax_loss

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(getattr(torch, "compiler", None), "is_compiling") or not shutil.which("g++"),
        reason="torch.compile needs torch >= 2.1 and a C++ compiler",
    ),
]
TARGETS = torch.arange(33) % 11


def prior(h):
    return torch.log_softmax(h[..., 0], -1)


# Of contexts h, shape (33, 2, 4), a table w, shape (11, 4), and a bias b, shape (11,).
LOSSES = {
    "softmax": lambda h, w, b: softmax_loss.blockwise_cross_entropy(
        h[:, 0], TARGETS, w, b, label_smoothing=0.1, ignore_index=1
    )[0],
    "adversarial": lambda h, w, b: softmax_loss.blockwise_cross_entropy(
        h[:, 0], TARGETS, w, b, margin=h[:, 0].norm(dim=1)
    )[0],
    "mixture": lambda h, w, b: mixture_loss.mixture_cross_entropy(h, prior(h), TARGETS, w, b)[0],
    "log mixture": lambda h, w, b: mixture_loss.log_mixture(h, prior(h), w, b)[:, 3].sum(),
    "consistency": lambda h, w, b: consistency_loss.consistency_cross_entropy(
        h, TARGETS, w, b, weight=1.0, symmetric=True
    )[0],
    "adaptive": lambda h, w, b: adaptive_loss.adaptive_cross_entropy(
        h[:, 0], h[:, 1, :2], TARGETS, w, b, (3, 7)
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_compiled_loss(name):
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((33, 2, 4), (11, 4), (11,))]
    expected = LOSSES[name](*leaves)
    gradients = torch.autograd.grad(expected, leaves)
    torch._dynamo.reset()
    found = torch.compile(LOSSES[name])(*leaves)
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(torch.autograd.grad(found, leaves), gradients):
        torch.testing.assert_close(mine, theirs)
