"""Weight decay that acts once on an SVD table."""

import copy
from types import SimpleNamespace

import pytest
import torch
from fairseq import optim
from fairseq.dataclass.configs import FairseqBMUFConfig
from fairseq.optim.bmuf import FairseqBMUF
from omegaconf import OmegaConf
from torch import nn

from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.errors import CheckpointError
from spectral_fairseq.methods.groups import undecayed_parameters
from spectral_fairseq.plugin.groups import split_groups
from tests.plugin.conftest import parameters_in_use
from tests.plugin.trainers import (
    ALL_PRECISIONS,
    PRECISIONS,
    build_trainer,
)

RATE, DECAY = 0.05, 0.02
OPTIMIZERS = {
    "sgd": {"momentum": 0.0},
    "adam": {"adam_betas": [0.9, 0.999], "adam_eps": 1e-8, "tpu": False},
    "nt_asgd": {"nt_asgd_from_start": False},
}


def _model():
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(3, 2), SVDEmbedding(11, 4, 1), nn.Linear(2, 2)])


def _optimizer(model, name="adam", decay=DECAY):
    options = {"_name": name, "lr": [RATE], "weight_decay": decay, **OPTIMIZERS[name]}
    return optim.build_optimizer(OmegaConf.create(options), list(model.parameters()))


def _step(optimizer, model, steps=1, grad=0.0):
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, grad)
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_alone_shrinks_the_table_as_a_plain_one(name):
    model = _model()
    optimizer = _optimizer(model, name)
    split_groups(optimizer, model)
    before, linear = model[1].dense().detach(), model[0].weight.detach().clone()
    _step(optimizer, model, 100)
    factor = (1 - RATE * DECAY) ** 100
    torch.testing.assert_close(model[1].dense().detach(), before * factor)
    torch.testing.assert_close(model[0].weight.detach(), linear * factor)


def test_a_model_without_factors_keeps_one_group():
    model = nn.Linear(3, 2)
    optimizer = _optimizer(model)
    split_groups(optimizer, model)
    assert len(optimizer.param_groups) == 1


def test_a_state_with_one_group_is_split():
    first, second = _model(), _model()
    one, two = _optimizer(first), _optimizer(second)
    split_groups(two, second)
    _step(one, first, 3, grad=0.1)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    assert [group["weight_decay"] for group in two.param_groups] == [DECAY, 0.0]
    for mine, theirs in zip(second.parameters(), first.parameters()):
        found, expected = (o.optimizer.state[p] for o, p in ((two, mine), (one, theirs)))
        assert torch.equal(found["exp_avg"], expected["exp_avg"])


def test_block_momentum_goes_back_to_a_state_with_the_groups():
    """--use-bmuf keeps the state that the optimiser begins with, for the end of its warm-up."""
    model = _model()
    optimizer = FairseqBMUF(FairseqBMUFConfig(distributed_world_size=2), _optimizer(model))
    split_groups(optimizer, model)
    optimizer._optimizer.load_state_dict(optimizer.initial_state)
    assert [group["weight_decay"] for group in optimizer.optimizer.param_groups] == [DECAY, 0.0]


def test_a_state_without_groups_is_refused():
    model = _model()
    optimizer = _optimizer(model)
    state = optimizer.state_dict()
    split_groups(optimizer, model)
    del state["param_groups"]
    with pytest.raises(CheckpointError, match="param_groups as torch saves them"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_of_another_model_is_refused_with_the_remedy(name, layers):
    """Such as that of plain tables, which are loaded into those of another kind."""
    model, other = _model(), nn.ModuleList([nn.Linear(3, 2) for _ in range(layers)])
    optimizer, saved = _optimizer(model, name), _optimizer(other, name)
    split_groups(optimizer, model)
    if layers == 3:
        split_groups(saved, other)
    _step(saved, other, grad=0.1)
    with pytest.raises(CheckpointError, match="--reset-optimizer") as refused:
        optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert f"one of {2 * layers}" in str(refused.value) and "--save-dir" in str(refused.value)


def flattened(model):
    """One tensor for all, and the optimiser that steps it."""
    flat = nn.Parameter(torch.cat([one.detach().view(-1) for one in model.parameters()]))
    inner = torch.optim.SGD([flat], lr=RATE, weight_decay=DECAY)
    halves = list(model.parameters())
    return SimpleNamespace(optimizer=inner, fp32_params={None: flat}, fp16_params=halves), inner


def composite(model):
    part = SimpleNamespace(optimizer=torch.optim.SGD(model.parameters(), RATE, weight_decay=DECAY))
    parts = SimpleNamespace(optimizers={"default": part})
    return SimpleNamespace(optimizer=parts), part.optimizer


def sharded(model):
    """fairscale's OSS would divide the parameters among the workers anew."""
    inner = torch.optim.SGD(model.parameters(), RATE, weight_decay=DECAY)
    inner.optim = torch.optim.SGD(model.parameters(), RATE, weight_decay=DECAY)
    return SimpleNamespace(optimizer=inner), inner


@pytest.mark.parametrize("wrap", [flattened, composite, sharded])
def test_an_optimiser_that_steps_no_parameter_by_itself(wrap, caplog):
    """It is left alone, and warned of where there is a decay."""
    model = _model()
    optimizer, inner = wrap(model)
    inner.param_groups[0]["weight_decay"] = 0.0
    split_groups(optimizer, model)
    assert not caplog.text
    inner.param_groups[0]["weight_decay"] = DECAY
    split_groups(optimizer, model)
    assert len(inner.param_groups) == 1 and "groups of its own" in caplog.text
    assert "--fp16-no-flatten-grads" in caplog.text and "--zero-sharding" in caplog.text


def test_a_schedule_by_plateaus_has_a_lowest_rate_for_each_group():
    """Before torch 2.6 it looks its list up by the group, and was built for one group."""
    model = _model()
    optimizer = _optimizer(model)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer.optimizer, min_lr=0.01)
    split_groups(optimizer, model, scheduler=SimpleNamespace(lr_scheduler=plateau))
    assert len(optimizer.optimizer.param_groups) == 2
    assert plateau.min_lrs == [0.01, 0.01]


def test_a_decay_that_begins_on_resumption_acts_once():
    model = _model()
    optimizer = _optimizer(model, decay=0.0)
    split_groups(optimizer, model)
    _step(optimizer, model, 2, grad=0.1)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state, {"weight_decay": DECAY})
    kept, moved = optimizer.optimizer.param_groups
    assert (kept["weight_decay"], moved["weight_decay"]) == (DECAY, 0.0)
    assert [tuple(one.shape) for one in moved["params"]] == [(11, 4), (4, 4)]


@pytest.mark.parametrize("precision", ALL_PRECISIONS)
@pytest.mark.parametrize("table", ["plain", "svd", "weight-norm", "spectral-norm"])
def test_of_a_training_only_u_and_v_do_not_decay(table, precision):
    if "memory" in precision and table in ("svd", "weight-norm"):
        pytest.skip("refused: half precision rounds its steps to nothing")
    trainer = build_trainer("optimizer.weight_decay=0.1", *PRECISIONS[precision], table=table)
    model, optimizer = trainer.get_model(), trainer.optimizer
    copies = getattr(optimizer, "fp32_params", None)
    stepped = {id(one): one for one in model.parameters()}
    if copies is not None:
        stepped = {id(half): copy for half, copy in zip(optimizer.fp16_params, copies)}
    found = {id(one): group for group in optimizer.param_groups for one in group["params"]}
    undecayed = {id(one) for one in undecayed_parameters(model)}
    assert len(undecayed) == (2 if table == "svd" else 0)
    trainer.optimizer.set_lr(0.25)
    for name, one in parameters_in_use(model).items():
        group = found[id(stepped[id(one)])]
        expected = 0.0 if id(one) in undecayed else 0.1
        assert (group["lr"], group["weight_decay"]) == (0.25, expected), name
