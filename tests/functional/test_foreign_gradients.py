"""No backward pass writes into a gradient that it was given, or gives away what it still needs."""

import importlib
import pkgutil

import pytest
import torch

import spectral_fairseq.functional
from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.functional.autograd import row_without_gradient
from spectral_fairseq.functional.blocks import without_ignored
from spectral_fairseq.functional.cosine_penalty import cosine_penalty
from spectral_fairseq.functional.fast_dropout import fast_dropout
from spectral_fairseq.functional.gram import gram
from spectral_fairseq.functional.mixture_loss import log_mixture
from spectral_fairseq.functional.row_norms import row_norms
from spectral_fairseq.functional.spectra import singular_values
from tests.functional.losses import LOSSES

TARGETS = torch.tensor([2, 1, 5, 0, 1, 4])
ROWS = torch.tensor([0, 3])


# Of contexts h, shape (6, 3, 4), scores q, shape (6, 3), a table w, shape (53, 4), and a bias b.
FUNCTIONS = {
    "gram": lambda h, q, w, b: gram(w, ROWS),
    "row norms": lambda h, q, w, b: row_norms(w),
    "singular values": lambda h, q, w, b: singular_values(w, ROWS),
    "cosine": lambda h, q, w, b: cosine_penalty(w, ROWS),
    "ignored": lambda h, q, w, b: without_ignored(1, TARGETS, h)[1],
    "distribution": lambda h, q, w, b: log_mixture(h, q.log_softmax(-1), w, b),
}
FUNCTIONS.update(
    (name, lambda *leaves, loss=loss: loss.fast(leaves, TARGETS)[0])
    for name, loss in LOSSES.items()
)

REFUSED_BY_NAME = {"softmax": "blockwise_cross_entropy", "mixture": "mixture_cross_entropy"}


def random_leaves():
    shapes = (6, 3, 4), (6, 3), (53, 4), (53,)
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_others(name):
    leaves = random_leaves()
    found = FUNCTIONS[name](*(leaf * 1 for leaf in leaves))
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


def test_a_row_without_gradient_is_left_out_of_a_copy():
    """The gradient of a sum reaches both of its terms as one tensor."""
    values, other = (torch.randn(60, 8, requires_grad=True) for _ in range(2))
    total = row_without_gradient(values, 1) + other
    total.square().sum().backward()
    assert torch.equal(other.grad, 2 * total)
    assert not values.grad[1].any() and torch.equal(values.grad[2:], other.grad[2:])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives_are_right_or_refused(name):
    """They were those of a constant, without a word."""
    leaves = random_leaves()
    message = f"first derivatives of {REFUSED_BY_NAME.get(name, '.*')} alone"
    with pytest.raises(UnsupportedError, match=message):
        value = FUNCTIONS[name](*leaves).square().sum()
        torch.autograd.grad(value, leaves, create_graph=True, allow_unused=True)


@pytest.mark.skipif(
    not hasattr(getattr(torch, "compiler", None), "is_compiling"), reason="needs torch 2.1"
)
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "ignored"])
def test_a_transform_of_torch_func_is_refused_by_name(name):
    """It ended in advice to whoever writes functions of autograd."""
    leaves = random_leaves()

    def function(*leaves):
        return FUNCTIONS[name](*leaves).square().sum()

    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(UnsupportedError, match="outside of the transforms of torch.func"):
            transform(function)(*(leaf.detach() for leaf in leaves))


def functions_of_autograd():
    package = spectral_fairseq.functional
    for part in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for found in vars(importlib.import_module(part.name)).values():
            if isinstance(found, type) and issubclass(found, torch.autograd.Function):
                yield found


def test_every_function_of_autograd_refuses_second_derivatives_or_has_them():
    """A new one with a backward pass of constants would be wrong in silence."""
    free = {one.__name__ for one in functions_of_autograd() if not _is_refusing(one)}
    # For which see test_cpu_attention.py, and test_tables.py of the embeddings.
    assert free == {"_FastDropout", "_AttentionWeights", "_RowWithoutGradient"}
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def dropped(x):
        torch.manual_seed(0)
        return fast_dropout(x, 0.4).pow(3)

    assert torch.autograd.gradgradcheck(dropped, (x,))


def _is_refusing(function):
    return function.backward.__code__.co_name == "first_only"  # of differentiable_once
