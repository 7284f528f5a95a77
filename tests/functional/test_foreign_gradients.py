"""No backward pass writes into a gradient that it was given, or gives away what it still needs."""

import importlib
import pkgutil

import pytest
import torch

import spectral_fairseq.functional
from spectral_fairseq.embeddings import SpectralNormEmbedding, SVDEmbedding, WeightNormEmbedding
from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.functional import adaptive_loss, consistency_loss, mixture_loss, softmax_loss
from spectral_fairseq.functional.blocks import without_ignored
from spectral_fairseq.functional.dispersion import dispersion_penalty
from spectral_fairseq.functional.dropout import fast_dropout
from spectral_fairseq.functional.gradients import Gates, gated_scores
from spectral_fairseq.functional.products import row_norms
from spectral_fairseq.functional.row_penalties import cosine_penalty
from spectral_fairseq.functional.spectra import gram, singular_values

TARGETS = torch.tensor([2, 1, 5, 0, 1, 4])
ROWS = torch.tensor([0, 3])
GATES = Gates(torch.arange(9) > 6, torch.rand(9), torch.rand(9))


def prior(h):
    return torch.log_softmax(h[..., 0], -1)


# Of contexts h, shape (6, 2, 4), and a table w, shape (9, 4).
FUNCTIONS = {
    "gram": lambda _, w: gram(w, ROWS),
    "row norms": lambda _, w: row_norms(w),
    "singular values": lambda _, w: singular_values(w, ROWS),
    "cosine": lambda _, w: cosine_penalty(w, ROWS),
    "gated scores": lambda h, w: gated_scores(h[:, 0], w, TARGETS, GATES),
    "ignored": lambda h, _: without_ignored(1, TARGETS, h)[1],
    "softmax": lambda h, w: softmax_loss.blockwise_cross_entropy(h[:, 0], TARGETS, w)[0],
    "consistency": lambda h, w: consistency_loss.consistency_cross_entropy(
        h, TARGETS, w, weight=1.0, symmetric=True
    )[0],
    "mixture": lambda h, w: mixture_loss.mixture_cross_entropy(h, prior(h), TARGETS, w)[0],
    "z-loss": lambda h, w: (
        softmax_loss.blockwise_cross_entropy(h[:, 0], TARGETS, w, z_loss=0.3, softcap=2.0).loss
    ),
    "dispersion": lambda h, _: dispersion_penalty([h], torch.ones(6, 2, dtype=torch.bool)),
    "log mixture": lambda h, w: mixture_loss.log_mixture(h, prior(h), w),
    "adaptive": lambda h, w: adaptive_loss.adaptive_cross_entropy(
        h[:, 0], h[:, 1, :2], TARGETS, w, None, (3, 5)
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_others(name):
    h, w = (torch.randn(*shape, dtype=torch.float64) for shape in ((6, 2, 4), (9, 4)))
    leaves = [h.requires_grad_(), w.requires_grad_()]
    found = FUNCTIONS[name](h * 1, w * 1)
    upstream = torch.randn_like(found)
    before = upstream.clone()
    first = torch.autograd.grad(found, leaves, upstream, retain_graph=True, allow_unused=True)
    assert torch.equal(upstream, before)
    expected = [None if one is None else one.clone() for one in first]
    for one in first:
        if one is not None:
            one.zero_()  # as an optimiser or a hook of somebody else may do
    assert torch.equal(upstream, before)
    again = torch.autograd.grad(found, leaves, upstream, allow_unused=True)
    assert all(one is two or torch.equal(one, two) for one, two in zip(again, expected))


@pytest.mark.parametrize("kind", [SVDEmbedding, WeightNormEmbedding, SpectralNormEmbedding])
def test_a_table_keeps_its_hooks_to_itself(kind):
    """The gradient of a sum reaches both of its terms as one tensor."""
    table = kind(60, 8, 1)
    for name, parameter in table.named_parameters():
        other = torch.randn_like(parameter).requires_grad_()
        total = parameter + other
        total.square().sum().backward()
        assert torch.equal(other.grad, 2 * total)
        if name in ("U", "g", "v", "stored"):
            assert not parameter.grad[1].any() and parameter.grad[2].any()


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_second_derivatives_are_right_or_refused(name):
    """They were those of a constant, without a word."""
    h, w = (torch.randn(*shape, dtype=torch.float64) for shape in ((6, 2, 4), (9, 4)))
    leaves = [h.requires_grad_(), w.requires_grad_()]

    def function(h, w):
        return FUNCTIONS[name](h, w).square().sum()

    with pytest.raises(UnsupportedError, match="first derivatives of .* alone"):
        torch.autograd.grad(function(*leaves), leaves, create_graph=True, allow_unused=True)


def test_a_gradient_penalty_through_a_layer_is_refused_by_name():
    h, w = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    loss = softmax_loss.blockwise_cross_entropy(h, TARGETS, w)[0]
    with pytest.raises(UnsupportedError, match="of blockwise_cross_entropy alone"):
        torch.autograd.grad(loss, h, create_graph=True)


def functions_of_autograd():
    package = spectral_fairseq.functional
    for part in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for found in vars(importlib.import_module(part.name)).values():
            if isinstance(found, type) and issubclass(found, torch.autograd.Function):
                yield found


def test_every_function_of_autograd_refuses_second_derivatives_or_has_them():
    """A new one with a backward pass of constants would be wrong in silence."""
    free = {one.__name__ for one in functions_of_autograd() if not _is_refusing(one)}
    assert free == {"_FastDropout"}
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def dropped(x):
        torch.manual_seed(0)
        return fast_dropout(x, 0.4).pow(3)

    assert torch.autograd.gradgradcheck(dropped, (x,))


def _is_refusing(function):
    return function.backward.__code__.co_name == "first_only"  # of differentiable_once
