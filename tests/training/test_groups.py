"""Groups of parameters: a decay that acts once, and a rate and a decay of the table's own."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.training import (
    Muon,
    SpectrumControl,
    factor_,
    hidden_matrices,
    parameter_groups,
    repair_,
    weight_norm_,
)
from tests.capabilities import MUON
from tests.training.models import LAYOUTS, TABLES, WORDS, build


class Model(nn.Module):
    """A tied table between two layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.norm = nn.Embedding(40, 8), nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 40, bias=True)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        return self.lm_head(self.norm(self.embed(ids)))


def decayed(model, optimizer, steps=10):
    """The output table after steps without a gradient: what the decay alone does."""
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return model.lm_head.weight.detach()


@pytest.mark.parametrize("kind", TABLES)
def test_the_decay_of_a_table_acts_once(kind):
    model = Model()
    before = model.lm_head.weight.detach().clone()
    table = TABLES[kind](model)
    groups = parameter_groups(model, lr=0.1, weight_decay=0.1)
    found = decayed(model, torch.optim.AdamW(groups))
    torch.testing.assert_close(found, before * 0.99**10, rtol=1e-5, atol=1e-6)
    if kind == "factors":
        for gram in table.grams():
            torch.testing.assert_close(gram, torch.eye(8), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_trained_parameter_is_in_one_group(transformers, kind, layout):
    model = build(transformers, layout)
    TABLES[kind](model)
    groups = parameter_groups(model, lr=0.1, weight_decay=0.2, table_lr=0.3, table_weight_decay=0.4)
    found = [id(one) for group in groups for one in group["params"]]
    trained = [id(one) for one in model.parameters() if one.requires_grad]
    assert sorted(found) == sorted(trained)
    rates = {(group["lr"], group["weight_decay"]) for group in groups}
    others = {(0.3, 0.0)} if kind == "factors" else set()
    assert rates == {(0.1, 0.2), (0.1, 0.0), (0.3, 0.4), *others}
    of_table = sum(len(group["params"]) for group in groups if group["lr"] == 0.3)
    assert of_table == {"plain": 1, "weight norm": 2, "factors": 3}[kind]


def test_the_table_has_its_own_rate_and_decay():
    model = Model()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    groups = parameter_groups(model, lr=0.1, weight_decay=0.0, table_lr=0.2, table_weight_decay=0.5)
    decayed(model, torch.optim.SGD(groups, lr=9.0), steps=1)
    for name, one in model.named_parameters():
        expected = before[name] * (0.9 if name == "embed.weight" else 1.0)
        torch.testing.assert_close(one.detach(), expected, msg=name)


@pytest.mark.parametrize(
    "change",
    [
        nn.utils.spectral_norm,
        nn.utils.parametrizations.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    ],
)
def test_a_table_that_torch_computes_is_that_of_its_parameters(change):
    """Its rate was left out in silence, and Muon was given the matrix behind spectral_norm."""
    model = nn.ModuleDict({"mid": nn.Linear(8, 8), "lm_head": nn.Linear(8, 40)})
    change(model["lm_head"])
    (stored,) = (one for one in model["lm_head"].parameters() if one.dim() == 2)
    rates = {
        id(one): group.get("lr")
        for group in parameter_groups(model, lr=0.1, table_lr=0.2)
        for one in group["params"]
    }
    assert rates.pop(id(stored)) == 0.2 and set(rates.values()) == {0.1} and len(rates) == 3
    assert [id(one) for one in hidden_matrices(model)] == [id(model["mid"].weight)]
    for forward in (False, True):
        if forward:
            with torch.no_grad():
                model["lm_head"](torch.zeros(1, 8))
        for use in (SpectrumControl, repair_, weight_norm_, factor_):
            with pytest.raises(ConfigurationError, match="computed from other parameters"):
                use(model)


def test_an_optimiser_that_lets_the_factors_decay_is_refused_before_its_first_step():
    if not hasattr(torch.optim.Optimizer, "register_step_pre_hook"):
        pytest.skip("this torch tells nobody of the steps of an optimiser")
    model = Model()
    factor_(model)
    before = model.lm_head.weight.detach().clone()
    with pytest.raises(ConfigurationError, match="act three times.*parameter_groups"):
        decayed(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1))
    assert torch.equal(model.lm_head.weight, before)
    decayed(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0))
    other = Model()  # whose table is plain
    decayed(other, torch.optim.AdamW(other.parameters(), lr=0.1, weight_decay=0.1))


@pytest.mark.parametrize("change", ["another decay", "another group"])
def test_an_optimiser_that_is_changed_is_looked_at_again(change):
    """It was looked at before its first step alone."""
    if not hasattr(torch.optim.Optimizer, "register_step_pre_hook"):
        pytest.skip("this torch tells nobody of the steps of an optimiser")
    model, other = Model(), Model()
    factor_(model)
    first = {"another decay": model, "another group": other}[change]
    decay = {"another decay": 0.0, "another group": 0.1}[change]
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.1, weight_decay=decay)
    decayed(first, optimizer)
    if first is model:
        optimizer.param_groups[0]["weight_decay"] = 0.1
    else:
        optimizer.add_param_group({"params": list(model.parameters())})
    with pytest.raises(ConfigurationError, match="act three times"):
        decayed(model, optimizer)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_model_is_refused_too(copied):
    if not hasattr(torch.optim.Optimizer, "register_step_pre_hook"):
        pytest.skip("this torch tells nobody of the steps of an optimiser")
    model = Model()
    factor_(model)
    other = copied(model)
    with pytest.raises(ConfigurationError, match="act three times"):
        decayed(other, torch.optim.AdamW(other.parameters(), lr=0.1, weight_decay=0.1))
    decayed(other, torch.optim.AdamW(parameter_groups(other, lr=0.1, weight_decay=0.1)))


@pytest.mark.parametrize("option", ["lr", "weight_decay", "table_lr", "table_weight_decay"])
def test_a_number_outside_its_range_is_named(option):
    with pytest.raises(ConfigurationError, match=option):
        parameter_groups(Model(), **{option: -1.0})


def test_no_decay_is_a_number():
    with pytest.raises(ConfigurationError, match="`weight_decay`"):
        parameter_groups(Model(), weight_decay=None)


@MUON
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_muon_takes_the_hidden_matrices_of_a_model(transformers, kind, layout):
    model = build(transformers, layout)
    TABLES[kind](model)
    matrices = hidden_matrices(model)
    named = {id(one): name for name, one in model.named_parameters()}
    names = [named[id(one)] for one in matrices]
    assert names and all(one.dim() == 2 and len(one) != WORDS for one in matrices)
    assert not any("embed" in name or "shared" in name or "wte" in name for name in names), names
    optimizer = Muon(parameter_groups(model, lr=0.1, weight_decay=0.1), matrices)
    trained = [one for one in model.parameters() if one.requires_grad]
    before = [one.detach().clone() for one in trained]
    for parameter in trained:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert all(not torch.equal(one, two) for one, two in zip(trained, before))
