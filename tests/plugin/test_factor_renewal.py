"""New factors of an SVD table after updates: --svd-interval."""

import pytest
import torch

from spectral_fairseq.functional.factor_renewal import redecomposition, singular_system
from spectral_fairseq.plugin.factor_renewal import renew_factors
from spectral_fairseq.plugin.find import find_svd_tables
from spectral_fairseq.plugin.trained_weights import moments, trained_weights
from tests.capabilities import HALF_ON_CPU
from tests.plugin.trainers import (
    PRECISIONS,
    STATES,
    build_trainer,
    counted,
    flattened_fp16,
    take_updates,
)


def svd_table(trainer):
    (table,) = find_svd_tables(trainer.get_model())
    return table


def furthest(trainer):
    """The largest relative distance of a stored sigma from the true one."""
    true = torch.linalg.svdvals(counted(trainer))
    learned = svd_table(trainer).singular_values().detach().double().sort(descending=True).values
    return float(((true - learned) / learned).abs().max())


# With --memory-efficient-fp16 an SVD table is refused, whatever the flags.
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", pytest.param("fp16", marks=HALF_ON_CPU), "bf16"])
def test_the_stored_sigma_are_the_singular_values(precision):
    plain, renewed = (
        build_trainer(*PRECISIONS[precision], table="svd", svd_interval=interval)
        for interval in (0, 3)
    )
    for trainer in (plain, renewed):
        take_updates(trainer, 6)
    rounding = {"float32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}[precision]
    assert furthest(plain) > 0.1
    assert furthest(renewed) < rounding


def assert_close_for_its_size(found, expected):
    """Float32 rounding is relative to the whole vector, not to its smallest element."""
    size = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * size)


def state_of(trainer):
    table = svd_table(trainer)
    factors = {"u": table.U, "sigma": table.sigma, "v": table.V}
    return {
        name: {key: value.double().clone() for key, value in found.items()}
        for name, found in (
            (name, moments(trainer.optimizer, factor)) for name, factor in factors.items()
        )
    }


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "adafactor", *STATES])
def test_the_table_stays_and_the_state_is_carried_over(optimizer):
    trainer = build_trainer(table="svd", optimizer=optimizer)
    take_updates(trainer, 4)
    table = svd_table(trainer)
    dense, before = table.dense().detach().double(), state_of(trainer)
    sigma, v = table.sigma.detach().double(), table.V.detach().double() / table.v_scale
    old_u = table.U.detach().double().clone()
    system = singular_system(table.U.detach(), sigma, v, table.excluded_rows)
    new = redecomposition(sigma, v, system, float(table.scale))
    renew_factors(table, trainer.optimizer)
    torch.testing.assert_close(table.dense().detach().double(), dense, rtol=1e-5, atol=1e-5)
    after = state_of(trainer)
    assert any(before.values())
    for name, gradient in (("u", new.u_gradient), ("v", new.v_gradient)):
        for key, old in before[name].items():
            if key == "exp_avg_sq_row":
                expected = old
            elif key in ("exp_avg", "momentum_buffer"):
                expected = old @ gradient
            else:
                expected = old @ gradient.square()
            assert_close_for_its_size(after[name][key], expected)
    for key, old in before["sigma"].items():
        if key in ("exp_avg", "momentum_buffer"):
            u = table.U.detach().double()
            own = old - (old_u * before["u"][key]).sum(0) / sigma
            expected = (u * after["u"][key]).sum(0) / table.sigma.detach().double()
            expected += own @ new.v_gradient.square()
        else:
            expected = old @ new.v_gradient.square()
        assert_close_for_its_size(after["sigma"][key], expected)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "sgd with momentum"])
def test_a_penalty_on_sigma_acts_as_without_renewal(optimizer):
    """Renewal must not take the penalty's own part out of the momentum."""

    def share_covered(interval):
        """Of the way to the prior."""
        trainer = build_trainer(
            table="svd", optimizer=optimizer, svd_interval=interval, spectrum_weight=0.0
        )
        table = svd_table(trainer)
        with torch.no_grad():
            table.sigma.mul_(torch.linspace(1.5, 0.5, len(table.sigma)))
        torch_optimizer, target, distances = trainer.optimizer, table.prior().detach(), []
        for update in range(1, 31):
            torch_optimizer.zero_grad()
            distances.append((table.singular_values() - target).square().sum())
            torch_optimizer.backward(distances[-1] / 100 + 0 * (table.U.sum() + table.V.sum()))
            torch_optimizer.step()
            if interval and update % interval == 0:
                renew_factors(table, trainer.optimizer)
        return 1 - float(distances[-1].detach() / distances[0].detach())

    assert share_covered(5) == pytest.approx(share_covered(0), rel=0.01)


def test_moments_in_a_flattened_float32_copy():
    optimizer, params, flat = flattened_fp16()
    assert moments(optimizer, params[1]) == {}
    flat.grad = torch.arange(flat.numel()).float()
    optimizer.optimizer.step()
    found = moments(optimizer, params[1])
    assert set(found) == {"exp_avg", "exp_avg_sq"}
    gradient = flat.grad[3:83].view(20, 4)
    torch.testing.assert_close(found["exp_avg"] / found["exp_avg"][-1, -1], gradient / 82)
    found["exp_avg"].zero_()
    state = optimizer.optimizer.state[flat]["exp_avg"]
    assert state[3:83].abs().max() == 0 < state[83:].abs().max()
    assert trained_weights(optimizer, params[1]).shape == (20, 4)


def test_a_singular_value_of_zero_leaves_the_table_alone():
    trainer = build_trainer(table="svd")
    table = svd_table(trainer)
    with torch.no_grad():
        table.sigma[3] = 0
    before = [one.detach().clone() for one in (table.U, table.sigma, table.V)]
    renew_factors(table, trainer.optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, (table.U, table.sigma, table.V)))


@pytest.mark.parametrize("frozen", ["U", "sigma", "V"])
def test_a_frozen_factor_leaves_the_table_alone(frozen):
    trainer = build_trainer(table="svd", svd_interval=1)
    table = svd_table(trainer)
    getattr(table, frozen).requires_grad_(False)
    before = getattr(table, frozen).detach().clone()
    take_updates(trainer, 2)
    assert torch.equal(before, getattr(table, frozen))


@pytest.mark.parametrize("optimizer", ["nag", "sgd with momentum"])
def test_gradient_steps_leave_the_factors_alone_by_default(optimizer, caplog):
    given = build_trainer(table="svd", optimizer=optimizer, svd_interval=1)
    take_updates(given, 2)
    assert furthest(given) < 1e-5
    with caplog.at_level("INFO"):
        default = build_trainer(table="svd", optimizer=optimizer, name="spectrum_control")
        take_updates(default, 10)
    assert furthest(default) > 1e-5
    assert f"because of --optimizer {optimizer.split()[0]}" in caplog.text


def test_renewal_is_the_default_of_spectrum_control():
    trainer = build_trainer(table="svd", name="spectrum_control", cosreg_weight=0.0)
    take_updates(trainer, 9)
    assert furthest(trainer) > 1e-3
    take_updates(trainer, 1)
    assert furthest(trainer) < 1e-5
