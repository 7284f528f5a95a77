"""Weight decay that acts once on an SVD table; a rate and a decay of the table's own."""

import copy
from types import SimpleNamespace

import pytest
import torch
from fairseq import optim
from omegaconf import OmegaConf
from torch import nn

from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.embeddings.table import undecayed_parameters
from spectral_fairseq.errors import CheckpointError, UnsupportedError
from spectral_fairseq.plugin.groups import TableOptions, split_groups
from tests.plugin.conftest import parameters_in_use
from tests.plugin.trainers import (
    ALL_PRECISIONS,
    PRECISIONS,
    build_trainer,
    same_models,
    save_in_epoch,
    take_updates,
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


def test_a_state_without_groups_is_refused():
    model = _model()
    optimizer = _optimizer(model)
    state = optimizer.state_dict()
    split_groups(optimizer, model)
    del state["param_groups"]
    with pytest.raises(CheckpointError, match="param_groups as torch saves them"):
        optimizer.load_state_dict(state)


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
    """It is left alone, and warned of where there is a decay; a group of the table is refused."""
    model = _model()
    optimizer, inner = wrap(model)
    table = TableOptions(2.0, None, tuple(model[1].parameters()))
    with pytest.raises(UnsupportedError, match="--fp16-no-flatten-grads"):
        split_groups(optimizer, model, table)
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
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer.optimizer)
    split_groups(optimizer, model, scheduler=SimpleNamespace(lr_scheduler=plateau))
    assert len(optimizer.optimizer.param_groups) == len(plateau.min_lrs) == 2


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


TABLES = ("plain", "svd", "weight-norm", "spectral-norm")
SCALED = ("criterion.table_lr_scale=4", "criterion.table_weight_decay=0.5")


def _of_table(model):
    """Names of the parameters of the output table, in whatever it is stored."""
    own = {id(one) for one in model.decoder.embed_tokens.parameters()}
    return {name for name, one in model.named_parameters() if id(one) in own}


def _weights(trainer):
    return {n: one.detach().clone() for n, one in trainer.get_model().named_parameters()}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("optimizer", ["sgd", "averaged sgd", "adam", "adafactor"])
def test_the_table_has_its_own_rate(optimizer, table):
    flags = {"optimizer": optimizer, "table": table}
    moved = []
    for scale in (1, 4):
        trainer = build_trainer(f"criterion.table_lr_scale={scale}", **flags)
        before = _weights(trainer)
        take_updates(trainer, 1)
        after = _weights(trainer)
        moved.append({name: after[name] - before[name] for name in before})
        assert trainer.get_lr() == trainer.cfg.optimization.lr[0]
    table_names = _of_table(trainer.get_model())
    for name, one in moved[0].items():
        factor = 4 if name in table_names else 1
        torch.testing.assert_close(moved[1][name], factor * one, rtol=1e-3, atol=2e-5, msg=name)
    assert table_names and all(moved[0][name].abs().max() > 0 for name in table_names)


@pytest.mark.parametrize("precision", ALL_PRECISIONS)
@pytest.mark.parametrize("table", TABLES)
def test_the_table_has_its_own_decay(table, precision):
    if "memory" in precision and table in ("svd", "weight-norm"):
        pytest.skip("refused: half precision rounds its steps to nothing")
    overrides = ("optimizer.weight_decay=0.1", *SCALED, *PRECISIONS[precision])
    trainer = build_trainer(*overrides, table=table)
    model, optimizer = trainer.get_model(), trainer.optimizer
    copies = getattr(optimizer, "fp32_params", None)
    stepped = {id(one): one for one in model.parameters()}
    if copies is not None:
        stepped = {id(half): copy for half, copy in zip(optimizer.fp16_params, copies)}
    found = {
        id(one): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for one in group["params"]
    }
    undecayed = {id(one) for one in undecayed_parameters(model)}
    names, rate = _of_table(model), trainer.get_lr()
    for name, one in parameters_in_use(model).items():
        expected = (4 * rate, 0.5) if name in names else (rate, 0.1)
        if id(one) in undecayed:
            expected = (expected[0], 0.0)
        assert found[id(stepped[id(one)])] == expected, name
    trainer.optimizer.set_lr(0.25)
    assert {group["lr"] for group in optimizer.param_groups} == {0.25, 1.0}


@pytest.mark.parametrize("table", ["plain", "svd"])
@pytest.mark.parametrize("saved, restored", [(SCALED, SCALED), ((), SCALED), (SCALED, ())])
def test_states_are_restored_with_and_without_a_group_of_the_table(
    saved, restored, table, tmp_path
):
    decay = ("optimizer.weight_decay=0.1",)
    first = build_trainer(*saved, *decay, table=table)
    take_updates(first, 3)
    save_in_epoch(first, tmp_path / "half.pt", 3)
    second = build_trainer(*restored, *decay, table=table, begin=False)
    second.load_checkpoint(str(tmp_path / "half.pt"))
    second.begin_epoch(1)
    for one, two in zip(first.get_model().parameters(), second.get_model().parameters()):
        states = (
            trainer.optimizer.optimizer.state.get(p) for trainer, p in ((first, one), (second, two))
        )
        mine, theirs = states
        assert (mine is None) == (theirs is None)
        assert not mine or torch.equal(mine["exp_avg"], theirs["exp_avg"])
    fresh = build_trainer(*restored, *decay, table=table)
    for group, expected in zip(second.optimizer.param_groups, fresh.optimizer.param_groups):
        for name in ("lr", "weight_decay", "lr_scale"):
            assert group[name] == pytest.approx(expected[name]), name
    if saved == restored:
        take_updates(first, 2)
        take_updates(second, 2)
        assert same_models(first, second)
