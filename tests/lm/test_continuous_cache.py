import math

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.lm.continuous_cache import (
    ContinuousCache,
    cache_probability,
    interpolate,
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


@pytest.mark.parametrize("block_scores", [1, 200, 10**6])
@pytest.mark.parametrize("segment", [1, 4, 23])
@pytest.mark.parametrize("window", [1, 5, 40])
def test_segments_equal_the_naive_loop_over_each_stream(window, segment, block_scores):
    rows = [stream(23, seed=seed) for seed in (3, 4)]
    features, targets, log_model = (torch.stack(one) for one in zip(*rows))
    plain = of_targets(log_model, targets)
    cache = ContinuousCache(window, block_scores)
    parts = []
    for start in range(0, 23, segment):
        here = slice(start, start + segment)
        found, seen = cache(features[:, here], targets[:, here], [0.7])
        parts.append(interpolate(plain[:, here], found[0], seen, 0.25))
    mixed = torch.cat(parts, 1)
    for b, (h, x, log_p) in enumerate(rows):
        naive = reference.log_with_cache(log_p, h, x, window, 0.7, 0.25)
        expected = torch.tensor(naive, dtype=torch.float64)
        torch.testing.assert_close(mixed[b], expected, rtol=1e-12, atol=1e-12)


def test_only_the_window_is_kept():
    features, targets, _ = stream(500)
    cache = ContinuousCache(9)
    cache(features[None], targets[None], [1.0])
    assert cache.keys.shape == (1, 9, 4) and cache.values.shape == (1, 9)
    # A view would keep the whole segment alive.
    assert cache.keys._base is None and cache.values._base is None
