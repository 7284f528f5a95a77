import pytest
import torch

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.adaptation import DynamicRates
from spectral_fairseq.lm.dynamic_evaluation import (
    CACHE_THETAS,
    CACHE_WEIGHTS,
    DYNAMIC_DECAYS,
    DYNAMIC_RATES,
    DYNAMIC_SEGMENT,
    DynamicEvaluation,
    GridPoint,
    GridSearch,
    check_dynamic_grid,
    gradient_statistics,
    search_cache,
    search_dynamic,
)
from spectral_fairseq.lm.evaluation import CacheGrid, evaluate, perplexity
from tests.lm.tiny_stateful import corpus, reader, tiny_model


def test_a_cache_is_searched_in_one_pass_of_the_model():
    model, tokens = tiny_model(), corpus(50)
    grid = CacheGrid(9, (0.0, 0.5, 1.0), (0.05, 0.3))
    search = search_cache(reader(model), tokens, grid)
    assert model.forwards == 10 and search.tokens == 50
    assert [tuple(one.values.values()) for one in search.points] == [
        (theta, weight) for theta in grid.thetas for weight in grid.weights
    ]
    for point in search.points:
        alone = CacheGrid(9, [point.values["theta"]], [point.values["lambda"]])
        nll = evaluate(reader(model), tokens, cache=alone).cached[0][0]
        assert point.perplexity == pytest.approx(perplexity(nll, 50), rel=1e-12)
    assert search.best.perplexity == min(one.perplexity for one in search.points)


def test_trials_of_dynamic_evaluation_do_not_disturb_each_other():
    model, tokens = tiny_model(), corpus(50)
    before = [one.clone() for one in model.parameters()]
    statistics = gradient_statistics(reader(model, 4), corpus(60))
    rates = [DynamicRates(eta, decay, 1e-3) for eta in (1e-3, 2e-2) for decay in (0.0, 0.5)]
    labels = [{"rate": one.rate, "decay": one.decay} for one in rates]
    search = search_dynamic(reader(model), tokens, statistics, rates, labels)
    for point, one in zip(search.points, rates):
        with DynamicEvaluation(model, statistics, one) as dynamic:
            nll = evaluate(reader(model), tokens, update=dynamic.update).nll
        assert point.perplexity == perplexity(nll, 50)
    assert len({point.perplexity for point in search.points}) == 4
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before))


def test_a_cache_can_be_searched_on_an_adapting_model():
    model, tokens = tiny_model(), corpus(50)
    statistics = gradient_statistics(reader(model, 4), corpus(60))
    dynamic = DynamicEvaluation(model, statistics, DynamicRates(0.02, 0.3, 1e-3))
    grid = CacheGrid(9, (0.5,), (0.2,))
    found = search_cache(reader(model), tokens, grid, dynamic).best
    with dynamic:
        nll = evaluate(reader(model), tokens, cache=grid, update=dynamic.update).cached[0][0]
    assert found.perplexity == perplexity(nll, 50)
    assert found.perplexity != search_cache(reader(model), tokens, grid).best.perplexity


def test_grids_hold_the_published_values():
    """Krause et al.'s code searches these for segments of 5; Merity et al. ended at those."""
    assert DYNAMIC_SEGMENT == 5
    assert DYNAMIC_RATES == (0.00003, 0.00004, 0.00005, 0.00006, 0.00007, 0.0001)
    assert DYNAMIC_DECAYS == (0.001, 0.002, 0.003, 0.005)
    assert {1.0, 0.662} <= set(CACHE_THETAS) and {0.1, 0.1279} <= set(CACHE_WEIGHTS)


def test_a_diverged_point_is_never_the_best():
    points = [GridPoint({"rate": 1.0}, float("inf")), GridPoint({"rate": 0.1}, 50.0)]
    assert GridSearch("dynamic", 9, points).best.values == {"rate": 0.1}
    with pytest.raises(ConfigurationError, match="smaller"):
        _ = GridSearch("dynamic", 9, points[:1]).best


def test_impossible_grids_are_refused():
    for rates, decays in (([], [0.1]), ([0.1], []), ([-0.1], [0.1])):
        with pytest.raises(ConfigurationError):
            check_dynamic_grid(rates, decays, 1e-3)
