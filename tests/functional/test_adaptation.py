import math

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.adaptation import (
    DynamicRates,
    cache_probability,
    decay_factors,
    dynamic_update_,
    interpolate,
    mean_of_means,
    step_sizes,
)
from tests.reference import evaluation as reference


def stream(length, dim=4, words=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(length, dim, generator=generator, dtype=torch.float64)
    targets = torch.randint(words, (length,), generator=generator)
    scores = torch.randn(length, words, generator=generator, dtype=torch.float64)
    return features, targets, torch.log_softmax(scores, -1)


def of_targets(log_model, targets):
    return log_model.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("window", [1, 2, 7, 22, 23, 100])
@pytest.mark.parametrize("before", [0, 1, 11])
def test_a_block_equals_the_naive_loop(window, before):
    rows = [stream(23, seed=seed) for seed in (0, 1, 2)]
    features, targets, log_model = (torch.stack(one) for one in zip(*rows))
    thetas, weights = (0.0, 0.662, 3.0), (0.0, 0.1279, 0.9)
    found, seen = cache_probability(
        features[:, before:], features, targets, targets[:, before:], window, thetas
    )
    assert found.shape == (3, 3, 23 - before)
    assert not found[..., ~seen].any()  # the first token sees no pair
    for weight in weights:
        mixed = interpolate(of_targets(log_model, targets)[:, before:], found, seen, weight)
        for k, theta in enumerate(thetas):
            for b, (h, x, log_p) in enumerate(rows):
                naive = reference.log_with_cache(log_p, h, x, window, theta, weight)[before:]
                expected = torch.tensor(naive, dtype=torch.float64)
                torch.testing.assert_close(mixed[k, b], expected, rtol=1e-12, atol=1e-12)


def test_float32_with_scores_that_overflow_an_exponential():
    features, targets, log_model = stream(40)
    features = 8 * features
    found, seen = cache_probability(
        features[None].float(), features[None].float(), targets[None], targets[None], 16, [1.4]
    )
    mixed = interpolate(of_targets(log_model, targets)[None].float(), found, seen, 0.3)
    assert float((1.4 * features @ features.t()).tril(-1).max()) > 500  # of float64 it is 709
    naive = reference.log_with_cache(log_model, features, targets, 16, 1.4, 0.3)
    expected = torch.tensor(naive, dtype=torch.float64)
    torch.testing.assert_close(mixed[0, 0].double(), expected, rtol=1e-4, atol=1e-5)


def test_no_weight_is_the_model_to_the_last_bit():
    features, targets, log_model = stream(12)
    found, seen = cache_probability(
        features[None], features[None], targets[None], targets[None], 4, [1.0]
    )
    plain = of_targets(log_model, targets)[None]
    assert torch.equal(interpolate(plain, found[0], seen, 0.0), plain)


@pytest.mark.parametrize("weight", [1.0, -0.1, math.nan])
def test_a_lambda_outside_its_range_is_refused(weight):
    log_model, seen = torch.zeros(1, 1), torch.tensor([True])
    with pytest.raises(ConfigurationError, match="`weight`"):
        interpolate(log_model, torch.zeros(1, 1), seen, weight)


def test_half_precision_states_are_multiplied_in_float32():
    features, targets, _ = stream(40, dim=100)
    half = features[None].bfloat16()
    found, _ = cache_probability(half, half, targets[None], targets[None], 16, [1.0])
    exact, _ = cache_probability(
        half.double(), half.double(), targets[None], targets[None], 16, [1.0]
    )
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-6)


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
    expected = reference.dynamic_update(weights, trained, gradients, rms, 0.05, decay, 1e-3)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


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
