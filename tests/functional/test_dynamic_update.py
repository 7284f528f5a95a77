import math

import pytest
import torch

from spectral_fairseq.functional.adaptation import (
    DynamicRates,
    decay_factors,
    dynamic_update_,
    mean_of_means,
    step_sizes,
)
from tests.reference import dynamic_evaluation as reference

SHAPES = [(5, 3), (7,), (2, 3, 2)]


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def fast(weights, trained, gradients, rms, rate, decay, epsilon):
    mean = mean_of_means(rms)
    return [
        dynamic_update_(
            w.clone(), w0, g, decay_factors(r, mean, decay), step_sizes(r, rate, epsilon)
        )
        for w, w0, g, r in zip(weights, trained, gradients, rms)
    ]


@pytest.mark.parametrize("decay", [1e-3, 0.3, 0.8, 1.5])  # the last two clip
def test_equals_the_rule_written_out(decay):
    weights, trained, gradients = tensors(0), tensors(1), tensors(2)
    rms = [one.abs() for one in tensors(3)]
    mean = mean_of_means(rms)
    clipped = any(bool((r / mean > 1 / decay).any()) for r in rms)
    assert clipped == (decay > 0.5)
    found = fast(weights, trained, gradients, rms, 0.05, decay, 1e-3)
    expected = reference.update(weights, trained, gradients, rms, 0.05, decay, 1e-3)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_decay_never_overshoots_the_trained_weights():
    rms = torch.tensor([0.0, 1e-6, 1.0, 50.0])
    factors = decay_factors(rms, 0.5, 0.3)
    torch.testing.assert_close(factors, torch.tensor([0.0, 6e-7, 0.6, 1.0]))


def test_each_tensor_weighs_the_same_in_the_mean():
    rms = [torch.full((100, 10), 1.0), torch.full((2,), 4.0)]
    assert mean_of_means(rms) == 2.5


def test_no_gradient_anywhere_leaves_the_weights():
    weights, trained = tensors(0), tensors(1)
    zeros = [torch.zeros_like(one) for one in weights]
    for one, other in zip(fast(weights, trained, zeros, zeros, 0.1, 0.2, 1e-3), weights):
        assert torch.equal(one, other)


def test_values_published_for_sums_do_what_their_code_did():
    weights, trained, gradients = tensors(0), tensors(1), tensors(2)
    batches = [tensors(seed) for seed in range(3, 10)]
    given = DynamicRates(rate=0.002, decay=0.075, epsilon=0.001)
    # The first code: roots of sums, and the sum of the tensors' means.
    roots = [torch.sqrt(sum(g * g for g in each)) for each in zip(*batches)]
    total = sum(root.mean() for root in roots)
    expected = [
        w
        + given.decay * torch.clamp(r / total, max=1 / given.decay) * (w0 - w)
        - given.rate * g / (r + given.epsilon)
        for w, w0, g, r in zip(weights, trained, gradients, roots)
    ]
    rms = reference.root_mean_squares(batches)
    found = fast(weights, trained, gradients, rms, *given.from_sums(len(batches), len(SHAPES)))
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_the_two_published_sets_are_of_one_size():
    found = DynamicRates(0.002, 0.02, 0.001).from_sums(1859, 14)
    assert found.rate == pytest.approx(5e-5, rel=0.1)
    assert found.decay == pytest.approx(0.002, rel=0.3)
    assert found.epsilon == pytest.approx(0.001 / math.sqrt(1859))
