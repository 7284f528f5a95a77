"""The penalties on the factors of an SVD table."""

import math

import torch

from spectral_fairseq.methods.penalties import four_weights
from tests.capabilities import AUTOCAST_ATTENTION
from tests.plugin.conftest import (
    build_criterion,
    build_model,
    make_sample,
    off_constraint,
)
from tests.reference import spectra

HEAVY = {"spectrum_weight": 0.3, "orthogonality_weights": "0.1,0.2,0.3,0.4"}


def test_loss_is_likelihood_plus_the_naive_penalties(task):
    model, sample = build_model(task), make_sample(task)
    table = off_constraint(model)
    with torch.no_grad():  # made-up words and padding are not counted
        table.U[table.excluded_rows] += 3.0
    model.train()
    loss, size, log = build_criterion(task, **HEAVY)(model, sample)
    u = spectra.without_rows(table.U.detach() / table.scale, table.excluded_rows.tolist())
    v = table.V.detach() / table.v_scale
    expected_orthogonality = spectra.orthogonality_penalty(u, v, (0.1, 0.2, 0.3, 0.4))
    expected_spectrum = spectra.spectrum_penalty(
        (table.sigma * table.scale).tolist(), table.prior().tolist()
    )
    assert math.isclose(log["orthogonality"] / size, expected_orthogonality, rel_tol=1e-4)
    assert math.isclose(log["spectrum"] / size, expected_spectrum, rel_tol=1e-5)
    total = float(log["loss"]) + size * (0.3 * expected_spectrum + float(expected_orthogonality))
    assert math.isclose(float(loss), total, rel_tol=1e-5)


@AUTOCAST_ATTENTION
def test_penalties_are_float32_under_autocast(task):
    model, sample = build_model(task).train(), make_sample(task)
    off_constraint(model)
    criterion = build_criterion(task, **HEAVY)
    exact = dict((n, v) for n, _, v in criterion.objective_of(model).penalties(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _, log = criterion(model, sample)
    for name, value in exact.items():
        assert log[name].dtype == torch.float32
        torch.testing.assert_close(log[name] / sample["ntokens"], value.detach())


def test_lazy_orthogonality_keeps_the_summed_gradient(task):
    """Every third update at three times the weight: the same sum while the table stands still."""
    model, sample = build_model(task).train(), make_sample(task)
    table = off_constraint(model)
    lazy = build_criterion(task, penalty_interval="3", **HEAVY)
    exact = build_criterion(task, penalty_interval="1", **HEAVY)
    sums = []
    for criterion in (lazy, exact):
        model.zero_grad()
        for update in range(6):
            criterion.num_updates = update
            criterion(model, sample)[0].backward()
        sums.append(table.U.grad.clone())
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-4, atol=1e-3)
    lazy.num_updates = 1
    log = lazy(model, sample)[2]
    assert log["orthogonality_size"] == 0 and log["spectrum_size"] == sample["ntokens"]


def test_orthogonality_weights_parse():
    assert four_weights("1, 2,0,0.5") == (1.0, 2.0, 0.0, 0.5)
