import dataclasses
import math

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.lm.carry import Carry
from spectral_fairseq.lm.continuous_cache import CacheGrid
from spectral_fairseq.lm.dynamic_evaluation import (
    DynamicEvaluation,
    DynamicRates,
    GradientStatistics,
    adapted_parameters,
    decay_factors,
    dynamic_update_,
    gradient_statistics,
    mean_of_means,
    step_sizes,
)
from spectral_fairseq.lm.evaluation import evaluate, perplexity
from spectral_fairseq.lm.grid_search import (
    CACHE_THETAS,
    CACHE_WEIGHTS,
    DYNAMIC_DECAYS,
    DYNAMIC_RATES,
    DYNAMIC_SEGMENT,
    GridSearch,
    check_dynamic_grid,
    search_cache,
    search_dynamic,
)
from tests.lm.tiny_stateful import START, corpus, reader, tiny_model
from tests.reference import evaluation as reference

RATES = DynamicRates(rate=0.02, decay=0.3, epsilon=1e-3)


def pieces(tokens, streams, segment):
    """(inputs, targets) of each segment, written out for equal streams."""
    inputs = torch.cat([torch.tensor([START]), tokens[:-1].long()])
    inputs, targets = (one.view(streams, -1) for one in (inputs, tokens.long()))
    for start in range(0, targets.size(1), segment):
        yield inputs[:, start : start + segment], targets[:, start : start + segment]


def loss_of(model, inputs, targets, carry):
    scores, extra = model(inputs, carry=carry)
    log_model = torch.log_softmax(scores, -1)
    loss = torch.nn.functional.nll_loss(log_model.flatten(0, 1), targets.flatten())
    return loss, log_model, extra["features"]


def naive_statistics(model, tokens, streams, segment, batches=None):
    gradients, carry = [], Carry()
    for inputs, targets in list(pieces(tokens, streams, segment))[:batches]:
        loss = loss_of(model, inputs, targets, carry)[0]
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    return reference.root_mean_squares(gradients)


def naive_evaluation(model, tokens, segment, rms, rates):
    """Summed nll, and what a cache over the adapting model needs."""
    parameters, carry = list(model.parameters()), Carry()
    trained = [one.detach().clone() for one in parameters]
    nll, log_models, features = 0.0, [], []
    for inputs, targets in pieces(tokens, 1, segment):
        loss, log_model, states = loss_of(model, inputs, targets, carry)
        nll += float(loss.detach()) * targets.numel()
        log_models.append(log_model[0].detach())
        features.append(states[0].detach())
        gradients = torch.autograd.grad(loss, parameters)
        new = reference.dynamic_update(
            [one.detach() for one in parameters], trained, gradients, rms, *rates
        )
        for parameter, value in zip(parameters, new):
            parameter.data = value
    for parameter, value in zip(parameters, trained):
        parameter.data = value
    return nll, torch.cat(log_models), torch.cat(features)


def adapted(model, **more):
    """The evaluation of 30 tokens during which the model adapts."""
    statistics = gradient_statistics(reader(model, 4), corpus(60))
    with DynamicEvaluation(model, statistics, RATES) as dynamic:
        return evaluate(reader(model), corpus(30), update=dynamic.update, **more)


@pytest.mark.parametrize("batches", [None, 3])
def test_statistics_equal_their_naive_form(batches):
    model, tokens = tiny_model(), corpus(60)
    found = gradient_statistics(reader(model, 4, 4), tokens, batches)
    expected = naive_statistics(model, tokens, 4, 4, batches)
    assert found.batches == (batches or 4)
    assert found.mean == pytest.approx(float(sum(r.mean() for r in expected) / len(expected)))
    for one, other in zip(found.rms, expected):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("segment", [5, 7])
@pytest.mark.parametrize("rates", [RATES, DynamicRates(0.05, 2.0, 1e-2)])
def test_equals_the_naive_loop_with_the_cache_beside_it(segment, rates):
    model, tokens = tiny_model(), corpus(41, seed=5)
    statistics = gradient_statistics(reader(model, 4, segment), corpus(60))
    grid = CacheGrid(8, (0.0, 0.8), (0.1, 0.4))
    with DynamicEvaluation(model, statistics, rates) as dynamic:
        found = evaluate(reader(model, 1, segment), tokens, cache=grid, update=dynamic.update)
    rms = naive_statistics(model, corpus(60), 4, segment)
    nll, log_model, features = naive_evaluation(model, tokens, segment, rms, rates)
    static = evaluate(reader(model, 1, segment), tokens).nll
    assert found.nll == pytest.approx(nll, rel=1e-10)
    assert abs(nll - static) > 1e-3 * static  # it did adapt
    for theta, row in zip(grid.thetas, found.cached):
        for weight, cached in zip(grid.weights, row):
            naive = reference.log_with_cache(log_model, features, tokens, 8, theta, weight)
            assert cached == pytest.approx(-sum(naive), rel=1e-10)


def test_trained_weights_come_back_bit_by_bit_even_after_an_error():
    model = tiny_model()
    before = {name: one.clone() for name, one in model.state_dict().items()}

    def stop(_count):
        assert not torch.equal(model.embed.weight, before["embed.weight"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adapted(model, progress=stop)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_shared_table_is_adapted_once_and_a_frozen_parameter_not_at_all():
    model = tiny_model()
    assert model.output.weight is model.embed.weight
    names = [name for name, _ in model.named_parameters()]
    assert len(adapted_parameters(model)) == len(names)
    model.output.bias.requires_grad_(False)
    assert len(adapted_parameters(model)) == len(names) - 1
    bias = model.output.bias.clone()
    adapted(model, progress=lambda _: torch.testing.assert_close(model.output.bias, bias))


def test_a_weight_without_a_gradient_decays_as_with_one_of_zero():
    model = tiny_model()
    model.unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    statistics = gradient_statistics(reader(model, 4), corpus(60))
    ones = [torch.ones_like(one) for one in statistics.rms]
    statistics = dataclasses.replace(statistics, rms=ones)
    with DynamicEvaluation(model, statistics, RATES) as dynamic:
        with torch.no_grad():
            model.unused.fill_(2.0)
        evaluate(reader(model), corpus(30), update=dynamic.update)
        assert (model.unused < 1.5).all()


def test_dropout_stays_off_and_the_run_repeats():
    model = tiny_model(dropout=0.5)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(adapted(model).nll)
    assert found[0] == found[1] and not model.training


def test_gradients_flow_even_where_the_caller_switched_them_off():
    expected = adapted(tiny_model()).nll
    with torch.no_grad():
        assert adapted(tiny_model()).nll == expected


def test_a_cache_is_searched_in_one_pass_of_the_model():
    model, tokens = tiny_model(), corpus(50)
    grid = CacheGrid(9, (0.0, 0.5, 1.0), (0.05, 0.3))
    search = search_cache(reader(model), tokens, grid)
    assert model.forwards == 10 and search.tokens == 50
    assert [(one["theta"], one["lambda"]) for one in search.points] == [
        (theta, weight) for theta in grid.thetas for weight in grid.weights
    ]
    for point in search.points:
        alone = CacheGrid(9, [point["theta"]], [point["lambda"]])
        nll = evaluate(reader(model), tokens, cache=alone).cached[0][0]
        assert point["perplexity"] == pytest.approx(perplexity(nll, 50), rel=1e-12)
    assert search.best == min(search.points, key=lambda one: one["perplexity"])


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
        assert point["perplexity"] == perplexity(nll, 50)
    assert len({point["perplexity"] for point in search.points}) == 4
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before))


def test_a_cache_can_be_searched_on_an_adapting_model():
    model, tokens = tiny_model(), corpus(50)
    statistics = gradient_statistics(reader(model, 4), corpus(60))
    dynamic = DynamicEvaluation(model, statistics, DynamicRates(0.02, 0.3, 1e-3))
    grid = CacheGrid(9, (0.5,), (0.2,))
    found = search_cache(reader(model), tokens, grid, dynamic).best
    with dynamic:
        nll = evaluate(reader(model), tokens, cache=grid, update=dynamic.update).cached[0][0]
    assert found["perplexity"] == perplexity(nll, 50)
    assert found != search_cache(reader(model), tokens, grid).best


def test_grids_hold_the_published_values():
    """Krause et al.'s code searches these for segments of 5; Merity et al. ended at those."""
    assert DYNAMIC_SEGMENT == 5
    assert DYNAMIC_RATES == (0.00003, 0.00004, 0.00005, 0.00006, 0.00007, 0.0001)
    assert DYNAMIC_DECAYS == (0.001, 0.002, 0.003, 0.005)
    assert {1.0, 0.662} <= set(CACHE_THETAS) and {0.1, 0.1279} <= set(CACHE_WEIGHTS)


def test_a_diverged_point_is_never_the_best():
    points = [{"rate": 1.0, "perplexity": float("inf")}, {"rate": 0.1, "perplexity": 50.0}]
    assert GridSearch("dynamic", 9, points).best == points[1]
    with pytest.raises(ConfigurationError, match="smaller"):
        _ = GridSearch("dynamic", 9, points[:1]).best


@pytest.mark.parametrize(
    "rates", [(-1.0, 0.1, 1e-3), (0.1, -0.1, 1e-3), (0.1, 0.1, 0.0), (float("nan"), 0.1, 1e-3)]
)
def test_impossible_rates_are_refused(rates):
    statistics = GradientStatistics([], 1.0, 1)
    with pytest.raises(ConfigurationError, match="dynamic evaluation"):
        DynamicEvaluation(tiny_model(), statistics, DynamicRates(*rates))


def test_impossible_grids_and_no_batch_are_refused():
    for rates, decays in (([], [0.1]), ([0.1], []), ([-0.1], [0.1])):
        with pytest.raises(ConfigurationError):
            check_dynamic_grid(rates, decays, 1e-3)
    with pytest.raises(ConfigurationError, match="`batches` to be a whole number >= 1"):
        gradient_statistics(reader(tiny_model(), 4), corpus(60), 0)


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
