"""SGD that averages its iterates, its trigger, and what damaged states end in."""

import copy
import math
import random
import types

import pytest
import torch
from torch import nn

from spectral_fairseq.errors import CheckpointError, ConfigurationError
from spectral_fairseq.lm.averaged_sgd import AveragedSGD
from spectral_fairseq.lm.muon import Muon
from spectral_fairseq.lm.non_monotonic import NonMonotonicTrigger
from spectral_fairseq.lm.wide_state import saved_groups
from tests.capabilities import MUON
from tests.reference import optimizers as reference

STEPS, START, DECAY = 9, 4, 0.05
# Another rate at every step: the rate of the step before would give another result.
RATES = [0.3 - 0.02 * t for t in range(STEPS)]


def problem(dtype=torch.float64, seed=0):
    """A parameter and, for every step, the gradient of a random quadratic."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(5, 3, generator=generator, dtype=torch.float64).to(dtype)
    targets = [torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(STEPS)]
    gradients = [lambda w, target=target: w - target.to(w.dtype) for target in targets]
    return nn.Parameter(start.clone()), gradients


def advance(optimizer, parameter, gradients, rates, start=None, first=0):
    for t, (gradient, rate) in enumerate(zip(gradients, rates), first):
        if t == start:
            optimizer.start_averaging()
        parameter.grad = gradient(parameter.detach())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


@pytest.mark.parametrize("start", [None, 0, START, STEPS - 1])
def test_average_equals_the_sum_written_out(start):
    parameter, gradients = problem()
    weights, average = reference.averaged_sgd(parameter.detach(), gradients, RATES, DECAY, start)
    optimizer = AveragedSGD([parameter], lr=1.0, weight_decay=DECAY)
    advance(optimizer, parameter, gradients, RATES, start)
    torch.testing.assert_close(parameter.detach(), weights, rtol=1e-12, atol=1e-12)
    assert optimizer.use_averages() is (start is not None)
    torch.testing.assert_close(parameter.detach(), average, rtol=1e-12, atol=1e-12)
    assert optimizer.averaged == (0 if start is None else STEPS - start)


@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_a_sparse_gradient_is_that_of_a_dense_one(decay):
    found = []
    for sparse in (False, True):
        table = nn.Embedding.from_pretrained(torch.ones(5, 3), freeze=False, sparse=sparse)
        optimizer = AveragedSGD(table.parameters(), lr=0.1, weight_decay=decay)
        for words in ([0, 2], [2, 4]):
            optimizer.zero_grad()
            table(torch.tensor(words)).square().sum().backward()
            optimizer.step()
        found.append(table.weight.detach())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_weights_have_a_float32_average(dtype):
    parameter, gradients = problem(dtype)
    optimizer = AveragedSGD([parameter], 1.0)
    kept = []
    for t, gradient in enumerate(gradients):
        advance(optimizer, parameter, [gradient], [RATES[t]], start=0, first=t)
        kept.append(parameter.detach().double())
    average = optimizer.state[parameter]["average"]
    assert average.dtype == torch.float32
    mean = sum(kept) / STEPS
    torch.testing.assert_close(average.double(), mean, rtol=1e-6, atol=1e-6)
    assert (average - average.to(dtype)).abs().max() > 1e-5  # more than the type can hold
    optimizer.use_averages()
    assert torch.equal(parameter, average.to(dtype))


def test_swapping_is_in_place_and_exact():
    parameter, gradients = problem(torch.float32)
    optimizer = AveragedSGD([parameter], 1.0)
    advance(optimizer, parameter, gradients, RATES, start=2)
    storage, before = parameter.data_ptr(), parameter.detach().clone()
    assert optimizer.use_averages() and not optimizer.use_averages()
    assert not torch.equal(parameter, before) and optimizer.averages_in_use
    assert optimizer.use_iterates() and not optimizer.use_iterates()
    assert torch.equal(parameter, before) and not optimizer.averages_in_use
    assert parameter.data_ptr() == storage


def test_a_step_from_the_averages_is_refused():
    parameter, gradients = problem()
    optimizer = AveragedSGD([parameter], 1.0)
    advance(optimizer, parameter, gradients, RATES, start=2)
    optimizer.use_averages()
    with pytest.raises(ConfigurationError, match="use_iterates"):
        optimizer.step()


def test_a_parameter_without_gradient_keeps_its_value_and_counts():
    """It has one gradient in four steps: its other iterates enter the average all the same."""
    idle, busy = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = AveragedSGD([idle, busy], lr=1.0)
    optimizer.start_averaging()
    for t in range(4):
        idle.grad = torch.ones(2) if t == 2 else None
        busy.grad = torch.ones(2)
        optimizer.step()
    optimizer.use_averages()
    torch.testing.assert_close(idle.detach(), torch.full((2,), (1 + 1 + 0 + 0) / 4))
    torch.testing.assert_close(busy.detach(), torch.full((2,), (0 - 1 - 2 - 3) / 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("cut", [2, START, 7])
@pytest.mark.parametrize("averages_saved", [True, False])
def test_resumed_equals_uninterrupted(cut, averages_saved, dtype):
    parameter, gradients = problem(dtype)
    through = AveragedSGD([parameter], 1.0, DECAY)
    resumed_parameter = nn.Parameter(parameter.detach().clone())
    advance(through, parameter, gradients, RATES, START)
    first = AveragedSGD([resumed_parameter], 1.0, DECAY)
    advance(first, resumed_parameter, gradients[:cut], RATES[:cut], START)
    if averages_saved:
        first.use_averages()
    weights, state = resumed_parameter.detach().clone(), copy.deepcopy(first.state_dict())

    parameters = nn.Parameter(weights)
    second = AveragedSGD([parameters], 1.0, DECAY)
    second.load_state_dict(state)
    second.use_iterates()
    advance(second, parameters, gradients[cut:], RATES[cut:], START, first=cut)
    assert torch.equal(parameters, parameter)
    assert second.averaged == through.averaged == STEPS - START
    average = through.state[parameter]["average"]
    assert torch.equal(second.state[parameters]["average"], average)
    assert average.dtype == torch.float32


@pytest.mark.parametrize("interval", [0, 1, 3, 5])
def test_equals_the_condition_written_out(interval):
    generator = random.Random(interval)
    fired = 0
    for _ in range(30):
        trigger, history = NonMonotonicTrigger(interval), []
        for _ in range(12):
            loss = generator.choice([1.0, 1.5, 2.0, 2.5, math.inf])  # ties included
            expected = reference.averaging_fires(history, interval, loss)
            assert trigger.check(math.nan if loss == math.inf else loss) is expected
            history.append(loss)
            fired += expected
    assert fired > 10


def test_fires_in_the_seventh_epoch_at_the_earliest():
    """n = 5: the value of the first epoch counts once five others came after it."""
    trigger = NonMonotonicTrigger()
    assert [trigger.check(1.0 + epoch) for epoch in range(7)] == [False] * 6 + [True]


def test_goes_on_from_a_history():
    trigger = NonMonotonicTrigger(1)
    trigger.history = [3.0, 4.0]
    assert trigger.reference == 3.0
    assert trigger.check(3.5)
    trigger.restart()
    assert not trigger.check(9.0)


@pytest.mark.parametrize("damage, name", [
    ({"param_groups": None}, "param_groups"),
    ({"param_groups": {}}, "param_groups"),
    ({"param_groups": [True]}, "param_groups"),
    ({"param_groups": [{}]}, "param_groups"),
    ({"state": None}, "state"),
    ({"state": []}, "state"),
])  # fmt: skip
@pytest.mark.parametrize("optimizer", [AveragedSGD, pytest.param(Muon, marks=MUON)])
def test_a_state_without_its_parts_is_refused(optimizer, damage, name):
    one = optimizer([nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))], lr=0.1)
    state = one.state_dict()
    assert saved_groups(state) == state["param_groups"]
    with pytest.raises(CheckpointError, match=f"with {name} as torch saves them"):
        one.load_state_dict({**state, **damage})
    del state[name]
    with pytest.raises(CheckpointError, match=f"found no such {name}"):
        one.load_state_dict(types.MappingProxyType(state))


@pytest.mark.parametrize("other, ours", [
    (torch.optim.Adam, AveragedSGD),
    pytest.param(torch.optim.SGD, Muon, marks=MUON),
])  # fmt: skip
def test_the_state_of_another_optimiser_is_refused(other, ours):
    parameter, gradients = problem()
    before = other([parameter], lr=0.1)
    advance(before, parameter, gradients[:1], RATES[:1])
    with pytest.raises(CheckpointError, match="another optimiser"):
        ours([parameter], lr=0.1).load_state_dict(before.state_dict())


def test_negative_rates_and_intervals_are_refused():
    with pytest.raises(ConfigurationError, match="`lr`"):
        AveragedSGD([problem()[0]], lr=-1.0)
    with pytest.raises(ConfigurationError, match="`interval`"):
        NonMonotonicTrigger(-1)
