"""Penalties of one table: their scale, their rows, and what they need of it."""

import json
import math
import pickle

import pytest
import torch
from torch import nn

from spectral_fairseq.errors import ConfigurationError, DataError
from spectral_fairseq.methods.penalties import PENALTIES, required_svd_tables
from spectral_fairseq.training import TablePenalty, factor_, fused_loss_, plain_, weight_norm_
from tests.reference.penalties import PENALTIES as NAIVE
from tests.training.models import DIM, WORDS, Straight, build


def test_penalties_have_one_scale(transformers):
    model = build(transformers)
    weight = model.lm_head.weight.detach().double()
    expected = {name: float(naive(weight)) for name, naive in NAIVE.items()}
    penalty = TablePenalty(model, c1=2.0, c2=0.1, **dict.fromkeys(NAIVE, 0.1))
    terms = {name: float(one) for name, one in penalty.terms().items()}
    assert terms == pytest.approx(expected, rel=1e-4)
    assert float(penalty()) == pytest.approx(0.1 * sum(expected.values()), rel=1e-4)
    penalty().backward()
    assert model.transformer.wte.weight.grad.any()
    assert float(TablePenalty(model)()) == 0.0


def test_a_model_on_the_device_meta(transformers):
    """The rows of padding of a table were read from a tensor without numbers."""
    expected = build(transformers, "marian")
    weight_norm_(expected)
    with torch.device("meta"):
        model = build(transformers, "marian")
        weight_norm_(model)
        penalty = TablePenalty(model, cosine=1.0)
    assert penalty.excluded == TablePenalty(expected).excluded == [1]
    model.load_state_dict(expected.state_dict(), assign=True)
    assert float(penalty()) == float(TablePenalty(expected, cosine=1.0)())


def test_defaults_are_those_of_the_flags(transformers):
    """nu was 1 here and 2 there."""
    model = build(transformers)
    for penalty in PENALTIES:
        given = {entry.argument: entry.default for entry in penalty.settings if entry.argument}
        if penalty.needs is not required_svd_tables:
            found, expected = (
                TablePenalty(model, **{penalty.name: 1.0}, **more)() for more in ({}, given)
            )
            assert float(found) == float(expected), penalty.name
    norms = model.lm_head.weight.detach().double().norm(dim=1)
    found = TablePenalty(model, weight_norm=1.0, norm_target=1.0)()
    assert float(found) == pytest.approx(float((norms - 1).square().sum().sqrt()), rel=1e-5)


def test_an_excluded_row_is_left_out_once(transformers):
    """A row that was named twice was taken out twice, and a negative one ended in IndexError."""
    model = build(transformers)
    names = ("cosine", "weight_norm", "spectral_normalization", "d_optimal")
    expected, *others = (
        TablePenalty(model, excluded=rows, **dict.fromkeys(names, 0.1)).terms()
        for rows in ((3, WORDS - 1), (WORDS - 1, 3, 3, WORDS - 1), (-1, 3))
    )
    assert all(found == expected for found in others)


def test_a_restored_penalty_keeps_the_norm_that_its_prior_refers_to(transformers):
    """A training that was resumed in another process took the norm of the trained table."""
    model = build(transformers)
    options = {"spectrum": 1.0, "c2": 0.1}
    first = TablePenalty(model, **options)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    resumed = TablePenalty(model, **options)
    assert float(resumed()) != float(first())
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert float(resumed()) == float(first())
    with pytest.raises(ConfigurationError, match="start_norm; found one with updates"):
        resumed.load_state_dict({"updates": 1})
    with pytest.raises(ConfigurationError, match="made without"):
        TablePenalty(**options).state_dict()


def test_penalties_on_factors(transformers):
    model = build(transformers)
    with pytest.raises(ConfigurationError, match="for `orthogonality`; .*factor_"):
        TablePenalty(model, orthogonality=1.0)
    table = factor_(model)
    with torch.no_grad():
        table.U.mul_(1.5)
        table.sigma[3] *= 2
    terms = TablePenalty(model, spectrum=1.0, orthogonality=1.0).terms()
    u = table.U.detach().double() / table.scale.double()
    v = table.V.detach().double() / table.v_scale
    eye = torch.eye(DIM, dtype=torch.float64)
    defects = sum(float((one.t() @ one - eye).square().sum()) for one in (u, v))
    assert float(terms["orthogonality"]) == pytest.approx(defects, rel=1e-4)
    sigma = (table.sigma.detach() * table.scale).double().abs().sort(descending=True).values
    k = torch.arange(1, DIM + 1, dtype=torch.float64)
    prior = torch.exp(-0.0005 * k)
    prior *= float(table.initial_norm) / prior.norm()
    assert float(terms["spectrum"]) == pytest.approx(
        float((sigma - prior).square().sum()), rel=1e-4
    )


def test_unknown_and_negative_penalties_are_refused(transformers):
    model = build(transformers)
    with pytest.raises(
        ConfigurationError, match=f"`excluded` to be a whole number >= -.*found {WORDS}"
    ):
        TablePenalty(model, cosine=1.0, excluded=(3, WORDS))
    for wrong, said in (
        ({"cosine": -1.0}, "`cosine` to be a finite number >= 0"),
        ({"cosinus": 1.0}, "one of cosine, .*found 'cosinus'"),
        ({"weight_norm": math.nan}, "`weight_norm` to be a finite number >= 0"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            TablePenalty(model, **wrong)
    plain_(model)  # there is nothing to take off


@pytest.mark.parametrize("names", [("d_optimal",), ("spectral_normalization", "cosine")])
def test_penalties_on_singular_values_need_as_many_words_as_dimensions(names):
    layer = nn.Linear(20, 30)
    with pytest.raises(ConfigurationError, match="N >= d"):
        TablePenalty(nn.Linear(30, 20), **dict.fromkeys(names, 1.0))
    with pytest.raises(ConfigurationError, match="N >= d"):
        TablePenalty(layer, excluded=range(11), **dict.fromkeys(names, 1.0))
    TablePenalty(layer, excluded=range(10), **dict.fromkeys(names, 1.0))
    TablePenalty(nn.Linear(30, 20), cosine=1.0)


@pytest.mark.parametrize("name", ["cosine", "weight_norm", "d_optimal"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_table_that_is_not_finite_is_refused(name, number):
    """Four penalties named it, and the cosines returned NaN."""
    model = Straight()
    penalty = TablePenalty(model, **{name: 1.0})
    with torch.no_grad():
        model.lm_head.weight[3, 2] = number
    with pytest.raises(DataError, match="infinity or NaN"):
        penalty()


def test_lengths_that_are_stored_leave_out_the_rows_that_are_named():
    """A weight-norm table took its own, which are those of padding in look-ups."""
    model = Straight(tied=True)
    model.embed.padding_idx = 1
    for rows in ((), (3, 5)):
        expected = TablePenalty(model, excluded=rows, weight_norm=1.0)()
        weight_norm_(model)
        found = TablePenalty(model, excluded=rows, weight_norm=1.0)()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        plain_(model)


@pytest.mark.parametrize("table", [None, weight_norm_, factor_])
def test_padding_is_left_out_unless_it_is_said_to_be_a_word(table):
    """As SpectrumControl, repair_ and fairseq's penalties leave it out; it was pulled to nu."""
    model = Straight(tied=True)
    model.embed.padding_idx = 1
    if table is not None:
        table(model)
    names = ("cosine", "weight_norm")
    default, without, with_it = (
        TablePenalty(model, **given, **dict.fromkeys(names, 1.0)).terms()
        for given in ({}, {"excluded": (1,)}, {"excluded": ()})
    )
    for name in names:
        assert float(default[name]) == float(without[name]) != float(with_it[name])


@pytest.mark.parametrize("names", [("spectrum", "orthogonality"), ("cosine", "spectrum")])
def test_the_matrix_of_factors_is_computed_for_those_that_need_it(names, monkeypatch):
    """Twice in each call, of which none was read where all penalties are of the factors."""
    model, calls = Straight(), []
    table = factor_(model)
    dense = type(table).dense
    monkeypatch.setattr(type(table), "dense", lambda self: calls.append(1) or dense(self))
    penalty = TablePenalty(model, **dict.fromkeys(names, 1.0))
    calls.clear()
    penalty().backward()
    assert len(calls) == ("cosine" in names)


def test_each_model_has_the_norm_of_its_own():
    """The prior of the second one kept the norm of the first."""
    first, second = Straight(), Straight()
    with torch.no_grad():
        second.lm_head.weight.mul_(10)
    penalty = TablePenalty(first, spectrum=1.0)
    penalty.bind(second)
    assert torch.equal(penalty(), TablePenalty(second, spectrum=1.0)())


def test_a_penalty_that_could_not_be_bound_has_no_model():
    penalty = TablePenalty(d_optimal=1.0)
    with pytest.raises(ConfigurationError, match="N >= d"):
        penalty.bind(nn.Linear(30, 20))
    assert penalty.model is None


def test_a_model_whose_loss_has_penalties_is_pickled():
    """Their declarations have functions without a name."""
    model = Straight(tied=True)
    factor_(model)
    options = {"spectrum": 1.0, "orthogonality": 0.1, "weight_norm": 0.1}
    loss = fused_loss_(model, shift=True, penalty=TablePenalty(model, **options))
    ids = torch.arange(12).view(2, 6)
    other = pickle.loads(pickle.dumps(loss))
    assert other.penalty.model is other.model and other.model is not model
    assert torch.equal(other(other.model(ids), ids), loss(model(ids), ids))


@pytest.mark.parametrize("table", [None, weight_norm_, factor_])
def test_a_loss_refuses_a_penalty_that_changes_nothing(table):
    model = Straight()
    if table is not None:
        table(model)
    model.lm_head.requires_grad_(False)
    for penalty in (TablePenalty(cosine=1.0), TablePenalty(model, cosine=1.0)):
        with pytest.raises(ConfigurationError, match="trained, for a penalty on it; found a froz"):
            fused_loss_(model, shift=True, penalty=penalty)
    model.lm_head.requires_grad_(True)
    fused_loss_(model, shift=True, penalty=TablePenalty(cosine=1.0))
