"""Muon for matrices, Adam for the rest: torch's own steps, resumed steps, several workers."""

import copy
import inspect

import pytest
import torch
from torch import nn

from spectral_fairseq.errors import CheckpointError, ConfigurationError, UnsupportedError
from spectral_fairseq.lm import muon
from spectral_fairseq.lm.muon import Muon, hidden_matrices_by_name
from tests.capabilities import MUON
from tests.workers import on_two_workers

WEIGHT, GRADIENT = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]]
KNOWN = {  # after a step of .1 without momentum and decay
    "original": [[0.9671875, 1.9997085, 2.9343750], [3.9999523, 4.9000001, 5.9666014]],
    "match_rms_adamw": [[0.9886334, 1.9998990, 2.9772668], [3.9999835, 4.9653592, 5.9884305]],
}


class Network(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.hidden = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.lstm, self.scale = nn.LSTM(6, 4), nn.Parameter(torch.ones(2, 3))
        self.norm, self.narrow = nn.LayerNorm(4), nn.Linear(4, 1)
        self.output = nn.Linear(4, 11)

    def forward(self, ids):
        states, _ = self.lstm(self.hidden(self.embed(ids)))
        return self.output(self.norm(states)) + self.scale.sum() + self.narrow(states)


# They add one number to all scores of a token: their gradients are rounding, whose sign Adam takes.
WITHOUT_GRADIENT = ("scale", "narrow.weight", "narrow.bias")
MATRICES = ["hidden.weight", "lstm.weight_ih_l0", "lstm.weight_hh_l0"]
IDS = torch.randint(11, (8, 4), generator=torch.Generator().manual_seed(1))


def optimiser(model, **options):
    matrices = hidden_matrices_by_name(model, [model.output.weight]).values()
    return Muon(model.parameters(), matrices, lr=0.02, weight_decay=0.1, **options)


def train(model, optimizer, steps, ids=IDS):
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids[:-1]).flatten(0, 1), ids[1:].flatten()).backward()
        optimizer.step()


def test_hidden_matrices_are_no_tables_biases_or_vectors():
    model = Network()
    assert list(hidden_matrices_by_name(model, [model.output.weight])) == MATRICES
    model.hidden.weight.requires_grad_(False)
    assert list(hidden_matrices_by_name(model, [model.output.weight])) == MATRICES[1:]


@MUON
@pytest.mark.parametrize("adjust", KNOWN)
def test_a_step_has_the_known_value(adjust):
    weight = nn.Parameter(torch.tensor(WEIGHT))
    weight.grad = torch.tensor(GRADIENT)
    Muon([weight], [weight], lr=0.1, momentum=0.0, adjust_lr_fn=adjust).step()
    torch.testing.assert_close(weight.detach(), torch.tensor(KNOWN[adjust]), rtol=0, atol=1e-3)


@MUON
def test_steps_are_those_of_torch_and_of_adam_bit_for_bit():
    model, other = Network(), Network()
    ours = optimiser(model)
    matrices = [dict(other.named_parameters())[name] for name in MATRICES]
    rest = [one for one in other.parameters() if not any(one is two for two in matrices)]
    options = {"lr": 0.02, "weight_decay": 0.1}
    adjusted = {**options, "adjust_lr_fn": "match_rms_adamw"}
    theirs = torch.optim.Muon(matrices, **adjusted)
    adam = Muon(rest, **options)
    train(model, ours, 4)
    for _ in range(4):
        other.zero_grad()
        scores = other(IDS[:-1]).flatten(0, 1)
        nn.functional.cross_entropy(scores, IDS[1:].flatten()).backward()
        theirs.step()
        adam.step()
    for name, one in other.named_parameters():
        assert torch.equal(one, dict(model.named_parameters())[name]), name


@MUON
def test_without_matrices_it_is_fairseqs_adam_bit_for_bit(monkeypatch):
    adam = pytest.importorskip("fairseq.optim.adam")
    monkeypatch.setattr(adam.Adam, "step", inspect.unwrap(adam.Adam.step))  # as it comes
    model, other = Network(), Network()
    options = {"lr": 0.02, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
    train(model, Muon(model.parameters(), **options), 4)
    train(other, adam.Adam(other.parameters(), **options), 4)
    for name, one in other.named_parameters():
        assert torch.equal(one, dict(model.named_parameters())[name]), name


@MUON
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_steps_are_the_same_bit_for_bit(dtype):
    model = Network().to(dtype)
    optimizer = optimiser(model)
    train(model, optimizer, 3)
    state, resumed = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model)
    other = optimiser(resumed)
    other.load_state_dict(state)
    assert other.state[resumed.hidden.weight]["momentum_buffer"].dtype == torch.float32
    train(model, optimizer, 3)
    train(resumed, other, 3)
    for one, two in zip(model.parameters(), resumed.parameters()):
        assert one.dtype == dtype and torch.equal(one, two)


@MUON
def test_a_copy_takes_the_same_matrices():
    model = Network()
    optimizer = optimiser(model)
    train(model, optimizer, 2)
    twin, other = copy.deepcopy((model, optimizer))
    train(model, optimizer, 2)
    train(twin, other, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))


@MUON
def test_other_parameters_in_the_groups_are_stepped_as_those_were():
    """accelerate puts a sharded model's parameters into the groups of an optimiser that is made."""
    found = []
    for replaced in (False, True):
        model = Network()
        optimizer = optimiser(model)
        if replaced:
            model = copy.deepcopy(model)
            (group,) = optimizer.param_groups
            group["params"] = list(model.parameters())
        train(model, optimizer, 2)
        assert "momentum_buffer" in optimizer.state[model.hidden.weight]
        found.append(model.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@MUON
def test_the_state_of_adam_is_refused():
    model = Network()
    adam = Muon(model.parameters(), lr=0.02)
    train(model, adam, 1)
    optimizer = optimiser(model)
    optimizer.load_state_dict({**adam.state_dict()})
    with pytest.raises(CheckpointError, match="which Muon is to step"):
        train(model, optimizer, 1)


@MUON
def test_what_muon_cannot_take_is_refused():
    model = Network()
    for matrices in ([model.hidden.bias], [model.hidden.weight.detach().clone()]):
        with pytest.raises(ConfigurationError, match="`matrices`"):
            Muon(model.parameters(), matrices)


OUTSIDE = {"lr": -1.0, "betas": (1.5, 0.9), "eps": -1e-8, "weight_decay": float("nan"),
           "momentum": 1.0, "adjust_lr_fn": "spectral"}  # fmt: skip


@MUON
@pytest.mark.parametrize("name", OUTSIDE)
def test_options_outside_their_range_are_refused(name):
    with pytest.raises(ConfigurationError, match=name):
        Muon(Network().parameters(), **{name: OUTSIDE[name]})


@MUON
def test_a_sparse_gradient_is_refused():
    layer = nn.Embedding(5, 3, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse=True"):
        Muon([layer.weight]).step()


def test_a_torch_without_muon_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ConfigurationError, match=r"torch.optim.Muon: 2.9 or newer"):
        optimiser(Network())
    assert muon.ADJUSTMENTS


def _trained_on_a_half(rank):
    model = Network()
    train(nn.parallel.DistributedDataParallel(model), optimiser(model), 4, IDS.chunk(2, 1)[rank])
    return model.state_dict()


@MUON
@pytest.mark.slow
def test_two_workers_stay_equal(tmp_path):
    first, second = on_two_workers(_trained_on_a_half, tmp_path)
    alone = Network()
    train(alone, optimiser(alone), 4)
    for name, expected in alone.state_dict().items():
        assert torch.equal(first[name], second[name]), name
        if name not in WITHOUT_GRADIENT:
            torch.testing.assert_close(first[name], expected, rtol=0, atol=2e-3)
