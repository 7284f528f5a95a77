import copy
import inspect

import pytest
import torch
from torch import nn

from spectral_fairseq.errors import CheckpointError, ConfigurationError, UnsupportedError
from spectral_fairseq.lm.coupled_adam import CoupledAdam
from tests.reference import optimizers as reference

LR, BETAS, EPS = 0.02, (0.9, 0.98), 1e-12


def problem(dtype=torch.float64, steps=7):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    scale = torch.tensor([[1.0], [0.1], [3.0], [0.0], [1.0]], dtype=torch.float64)  # row 3: unused
    gradients = [
        scale * torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(steps)
    ]
    return nn.Parameter(start.to(dtype)), [gradient.to(dtype) for gradient in gradients]


def advance(optimizer, parameter, gradients):
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("coupled", [False, True])
def test_equals_the_paper_in_float64(coupled):
    parameter, gradients = problem()
    expected = reference.coupled_adam(parameter.detach(), gradients, LR, BETAS, EPS, coupled)
    tables = [parameter] if coupled else []
    advance(CoupledAdam([parameter], tables, LR, BETAS, EPS), parameter, gradients)
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-9, atol=1e-9)


def test_without_tables_it_is_fairseqs_adam_bit_for_bit(monkeypatch):
    adam = pytest.importorskip("fairseq.optim.adam")
    monkeypatch.setattr(adam.Adam, "step", inspect.unwrap(adam.Adam.step))  # as it comes
    ours, gradients = problem(torch.float32)
    theirs = nn.Parameter(ours.detach().clone())
    options = {"lr": LR, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.1}
    advance(CoupledAdam([ours], **options), ours, gradients)
    advance(adam.Adam([theirs], **options), theirs, gradients)
    assert torch.equal(ours, theirs)


def test_only_tables_share_their_moments():
    (table, gradients), (other, _) = problem(), problem()
    optimizer = CoupledAdam([table, other], [table], LR, BETAS)
    table.grad, other.grad = gradients[0].clone(), gradients[0].clone()
    optimizer.step()
    assert optimizer.state[table]["exp_avg_sq"].shape == (1, 3)
    assert optimizer.state[other]["exp_avg_sq"].shape == (5, 3)
    assert not torch.equal(table, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_steps_are_the_same_bit_for_bit(dtype):
    parameter, gradients = problem(dtype)
    optimizer = CoupledAdam([parameter], [parameter], LR, BETAS)
    advance(optimizer, parameter, gradients[:3])
    state, resumed = copy.deepcopy(optimizer.state_dict()), nn.Parameter(parameter.detach().clone())
    other = CoupledAdam([resumed], [], LR, BETAS)
    other.load_state_dict(state)
    other.couple([resumed])
    assert other.state[resumed]["exp_avg_sq"].dtype == torch.float32
    advance(optimizer, parameter, gradients[3:])
    advance(other, resumed, gradients[3:])
    assert torch.equal(parameter, resumed)


def test_what_cannot_be_coupled_is_refused():
    parameter, gradients = problem()
    with pytest.raises(ConfigurationError, match="`tables`"):
        CoupledAdam([parameter], [parameter.detach().clone()])
    bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigurationError, match=r"shape \(3,\)"):
        CoupledAdam([parameter, bias], [bias])
    optimizer = CoupledAdam([parameter], lr=LR)
    advance(optimizer, parameter, gradients)
    with pytest.raises(CheckpointError, match="one for all rows"):
        optimizer.couple([parameter])


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"betas": (1.5, 0.9)}, {"eps": -1e-8}, {"weight_decay": float("nan")}]
)
def test_numbers_outside_their_range_are_refused(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        CoupledAdam([nn.Parameter(torch.zeros(3))], **options)


def test_a_sparse_gradient_is_refused():
    layer = nn.Embedding(5, 3, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse=True"):
        CoupledAdam([layer.weight], [layer.weight]).step()


@pytest.mark.parametrize("coupled_before", [True, False])
def test_moments_that_were_coupled_otherwise_are_refused(coupled_before):
    parameter, gradients = problem()
    before = CoupledAdam([parameter], [parameter] * coupled_before, LR, BETAS)
    advance(before, parameter, gradients[:1])
    after = CoupledAdam([parameter], [parameter] * (not coupled_before), LR, BETAS)
    after.load_state_dict(before.state_dict())
    with pytest.raises(CheckpointError, match="loaded ones of shape"):
        advance(after, parameter, gradients[1:])


def test_a_copy_is_coupled_too():
    parameter, gradients = problem()
    optimizer = CoupledAdam([parameter], [parameter], LR, BETAS)
    advance(optimizer, parameter, gradients[:3])
    twin = copy.deepcopy(optimizer)
    copied = twin.param_groups[0]["params"][0]
    advance(optimizer, parameter, gradients[3:])
    advance(twin, copied, gradients[3:])
    assert copied is not parameter and torch.equal(copied, parameter)
