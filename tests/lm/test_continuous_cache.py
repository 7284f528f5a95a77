import pytest
import torch

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.adaptation import interpolate
from spectral_fairseq.lm.evaluation import ContinuousCache
from tests.functional.test_adaptation import of_targets, stream
from tests.reference import cache as reference


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
        naive = reference.log_probabilities(log_p, h, x, window, 0.7, 0.25)
        expected = torch.tensor(naive, dtype=torch.float64)
        torch.testing.assert_close(mixed[b], expected, rtol=1e-12, atol=1e-12)


def test_only_the_window_is_kept():
    features, targets, _ = stream(500)
    cache = ContinuousCache(9)
    cache(features[None], targets[None], [1.0])
    assert cache.keys.shape == (1, 9, 4) and cache.values.shape == (1, 9)
    # A view would keep the whole segment alive.
    assert cache.keys._base is None and cache.values._base is None


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_below_one_is_refused(window):
    with pytest.raises(ConfigurationError, match="window"):
        ContinuousCache(window)
