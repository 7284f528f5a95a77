"""Renewed factors: the same table, orthonormal factors, and the gradients of the new factors."""

import itertools
import math

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError, DataError
from spectral_fairseq.functional.factor_renewal import redecomposition, singular_system
from spectral_fairseq.functional.spectra import singular_values
from spectral_fairseq.functional.spectrum_penalty import Prior, spectrum_penalty
from spectral_fairseq.functional.table_control import (
    SCALES,
    SIDES,
    TableChange,
    apply_change_,
    counted_norm,
    plan_change,
)
from tests.reference import spectra as reference

EXCLUDED = torch.tensor([0, 40, 122])


def table(n=123, d=7, seed=0):
    """Columns of different lengths and a mean that is not zero."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return matrix * torch.linspace(3, 1, d, dtype=torch.float64) + 0.4


def prior(dim=7, norm=40.0):
    return Prior(c2=0.2).spectrum(dim, norm)


def changed(matrix, target, rate, excluded=None, **options):
    matrix = matrix.clone()
    apply_change_(matrix, plan_change(matrix, target, rate, excluded=excluded, **options), excluded)
    return matrix


@pytest.mark.parametrize("side, scale", itertools.product(SIDES, SCALES))
@pytest.mark.parametrize("rate, centering", [(0.0, 0.5), (0.3, 0.0), (0.3, 0.4), (1.0, 1.0)])
def test_a_step_equals_the_naive_one(side, scale, rate, centering):
    options = {"side": side, "scale": scale, "slack": 1.2, "centering": centering}
    fast = changed(table(), prior(), rate, EXCLUDED, **options)
    naive = reference.controlled(table(), prior(), rate, excluded=EXCLUDED.tolist(), **options)
    torch.testing.assert_close(fast, naive, rtol=1e-9, atol=1e-10)
    assert torch.equal(fast[EXCLUDED], table()[EXCLUDED])


@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.float16, 2e-3)])
def test_lower_precisions_in_several_blocks(dtype, tolerance, monkeypatch):
    monkeypatch.setattr("spectral_fairseq.functional.table_control.CONTROL_ROWS", 50)
    matrix, target = table(507, 123).to(dtype), prior(123, 300.0)
    options = {"side": "above", "scale": "free", "slack": 1.1, "centering": 0.5}
    naive = reference.controlled(matrix, target, 0.5, **options)
    fast = changed(matrix, target, 0.5, **options)
    assert fast.dtype == dtype
    torch.testing.assert_close(fast.double(), naive, rtol=tolerance, atol=4 * tolerance)


def degenerate(kind, n=5000, d=64):
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(n, d, generator=generator, dtype=torch.float64)
    if kind == "low rank":
        return rows[:, :16] @ torch.randn(16, d, generator=generator, dtype=torch.float64)
    if kind == "zero columns":
        return rows * (torch.arange(d) % 3).double()
    if kind == "steep":
        return (rows * torch.exp(-0.3 * torch.arange(d).double())) @ torch.linalg.qr(rows[:d])[0]
    mean_cosine = {"random": 0.0, "cone": 0.97, "narrow cone": 0.9998}[kind]
    length = (d * mean_cosine / (1 - mean_cosine)) ** 0.5
    return rows + length * torch.nn.functional.normalize(rows[0], dim=0)


DEGENERATE = ("random", "cone", "narrow cone", "low rank", "zero columns", "steep")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rate", [0.1, 1.0])
@pytest.mark.parametrize("kind", DEGENERATE)
def test_a_free_scale_keeps_the_norm_of_the_table(kind, rate, dtype):
    """A step along the chord, and directions that cannot be raised, made it smaller each time."""
    matrix = degenerate(kind).to(dtype)
    matrix[3] = 7.0  # excluded, so neither counted nor changed
    target, excluded = torch.exp(-0.0005 * torch.arange(64).double()), torch.tensor([3])
    counted = torch.arange(len(matrix)) != 3
    before = matrix[counted].double().norm()
    for _ in range(100 if rate < 1 else 20):
        apply_change_(
            matrix, plan_change(matrix, target, rate, side="both", excluded=excluded), excluded
        )
    assert float(matrix[counted].double().norm() / before) == pytest.approx(1, abs=1e-5)
    assert bool(matrix[3].eq(7).all())
    sigma = torch.linalg.svdvals(matrix[counted].double())
    resolved = sigma[sigma > 1e-5 * sigma[0]]
    shape = target[: len(resolved)]
    torch.testing.assert_close(resolved / resolved.norm(), shape / shape.norm(), rtol=0.02, atol=0)


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_small_values_of_a_table_in_float32_are_raised(rate):
    """A Gram matrix in float32 knows them down to a few thousandths of the largest."""
    sigma = torch.exp(-0.18 * torch.arange(64).double())  # down to 1.2e-5
    matrix = torch.linalg.qr(degenerate("random"))[0] * sigma
    matrix = (matrix @ torch.linalg.qr(degenerate("random")[:64])[0]).float()
    options = {"side": "both", "scale": "fixed", "slack": 1.0}
    naive = reference.controlled(matrix, prior(64, 1.0), rate, **options)
    fast = changed(matrix, prior(64, 1.0), rate, **options)
    assert float((fast.double() - naive).norm() / naive.norm()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_norm_of_a_table_has_nothing_of_rows_that_do_not_count(dtype, monkeypatch):
    """Their share was subtracted, which left the roundoff of a long one."""
    monkeypatch.setattr("spectral_fairseq.functional.table_control.CONTROL_ROWS", 50)
    matrix = table().to(dtype)
    matrix[EXCLUDED] *= 1000
    counted = torch.ones(len(matrix), dtype=torch.bool).index_fill(0, EXCLUDED, False)
    expected = float(matrix[counted].double().norm())
    assert counted_norm(matrix, EXCLUDED) == pytest.approx(expected, rel=1e-7)
    matrix[EXCLUDED[1], 2] = math.inf
    assert math.isnan(counted_norm(matrix, EXCLUDED))


def test_what_is_within_the_slack_stays_bit_for_bit():
    matrix = table()
    assert torch.equal(changed(matrix, prior(), 1.0, side="above", slack=9.0), matrix)
    assert torch.equal(changed(matrix, prior(), 0.0, side="both"), matrix)


def test_equal_values_are_moved_together():
    basis = torch.linalg.qr(table(60, 5))[0]
    moved = changed(3 * basis, torch.full((5,), 2.0).double(), 0.5, side="both", scale="fixed")
    torch.testing.assert_close(moved, 2.5 * basis)


def test_a_change_survives_being_packed():
    change = plan_change(table(), prior(), 0.5, side="both", centering=0.1)
    for sent, received in zip(change, TableChange.unpacked(change.packed())):
        assert torch.equal(sent, received)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_table_that_is_not_finite_is_refused_unwritten(value):
    matrix = table().float()
    matrix[5, 2] = value
    before = matrix.clone()
    with pytest.raises(DataError, match="a table of finite numbers"):
        apply_change_(matrix, plan_change(matrix, prior(), 0.5, side="both"))
    torch.testing.assert_close(matrix, before, equal_nan=True, rtol=0, atol=0)


def test_a_prior_of_another_length_is_refused():
    with pytest.raises(ConfigurationError, match=r"a prior of shape \(7,\)"):
        plan_change(table(), prior(6), 0.5)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"rate": 2.0}, "`rate` to be a finite number >= 0 and <= 1"),
        ({"rate": -0.5}, "`rate` to be a finite number >= 0 and <= 1"),
        ({"rate": float("nan")}, "`rate` to be a finite number >= 0 and <= 1"),
        ({"centering": 3.0}, "`centering` to be a finite number >= 0 and <= 1"),
        ({"slack": 0.1}, "`slack` to be a finite number >= 1"),
        ({"side": "abvoe"}, "`side` to be one of both, above"),
        ({"scale": "fre"}, "`scale` to be one of fixed, free"),
        ({"weight": table()[:6]}, "N = 6 .* d = 7"),
        ({"excluded": torch.arange(len(table()) - 6)}, "at least as many words as dim.* N = 6"),
    ],
)
def test_options_outside_their_range_are_refused(changed, message):
    options = {"weight": table(), "prior": prior(), "rate": 0.5, **changed}
    with pytest.raises(ConfigurationError, match=message):
        plan_change(**options)


def penalty(matrix, target):
    return spectrum_penalty(singular_values(matrix, torch.tensor([2])), target)


def with_values(sigma):
    """A matrix with these singular values and a row of zeros, which is left out."""
    basis = torch.linalg.qr(table(12, 5).index_fill(0, torch.tensor([2]), 0))[0]
    rotation = torch.linalg.qr(table(5, 5, seed=1))[0]
    return (basis * torch.tensor(sigma, dtype=torch.float64)) @ rotation


@pytest.mark.parametrize(
    "sigma, targets",
    [
        ([5.0, 4.1, 3.2, 2.3, 1.4], [6.0, 4.0, 3.0, 2.0, 1.0]),
        ([5.0, 3.2, 3.2, 3.2, 1.4], [6.0, 2.0, 2.0, 2.0, 1.0]),
        ([3.2, 3.2, 3.2, 3.2, 3.2], [2.0, 2.0, 2.0, 2.0, 2.0]),
        # A kink: both ways along any direction, the slopes differ, and their mean is the gradient.
        ([5.0, 5.0, 3.2, 1.4, 1.4], [6.0, 4.0, 3.0, 2.0, 1.0]),
    ],
)
def test_penalty_gradcheck_equal_values_included(sigma, targets):
    targets = torch.tensor(targets, dtype=torch.float64)
    matrix = with_values(sigma).requires_grad_()
    assert torch.autograd.gradcheck(lambda m: penalty(m, targets), (matrix,))


@pytest.mark.parametrize("side", SIDES)
def test_a_degenerate_table_in_float32_is_changed_as_in_float64(side):
    """Its first eigenvalue is a thousand times the others, all of which count."""
    matrix, target = table(10_000, 128) + 8.0, torch.full((128,), 300.0)
    ratios = [plan_change(one, target, 1.0, side=side).ratio for one in (matrix, matrix.float())]
    torch.testing.assert_close(ratios[1].double(), ratios[0], rtol=1e-3, atol=0)


def test_roundoff_of_a_long_mean_is_not_taken_for_a_spectrum():
    """With 300 times the spread, float32 once took noise for singular values and stretched it."""
    torch.manual_seed(0)
    table = torch.randn(5000, 64, dtype=torch.float64) + 300 * torch.randn(64).double()
    options = {"side": "both", "centering": 1.0}
    change = plan_change(table.float(), torch.ones(64), 0.1, **options)
    exact = plan_change(table, torch.ones(64).double(), 0.1, **options)
    assert float(change.ratio.max()) <= float(exact.ratio.max()) + 0.01


EXCLUDED_ROWS = torch.tensor([0, 40])


def factors(n=123, d=7, seed=0):
    """Factors that are far from orthonormal, one sigma being negative."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(n, d, generator=generator, dtype=torch.float64) + 0.4
    v = torch.eye(d, dtype=torch.float64) + 0.2 * torch.randn(
        d, d, generator=generator, dtype=torch.float64
    )
    sigma = torch.linspace(3, -1, d, dtype=torch.float64)
    return u, torch.where(sigma.abs() < 0.1, 0.5, sigma), v


def renewed(u, sigma, v, scale=1.0):
    new = redecomposition(sigma, v, singular_system(u, sigma, v, EXCLUDED_ROWS), scale)
    return new, (u @ new.u_map, new.sigma, new.vectors)


def dense(u, sigma, v):
    return (u * sigma) @ v.t()


@pytest.mark.parametrize("scale", [1.0, 3.5])
def test_the_table_stays_and_its_factors_are_its_decomposition(scale):
    old = factors()
    _, (u, sigma, v) = renewed(*old, scale)
    table = dense(*old)
    torch.testing.assert_close(dense(u, sigma, v), table, rtol=1e-10, atol=1e-10)
    counted = [i for i in range(123) if i not in EXCLUDED_ROWS.tolist()]
    true = torch.linalg.svdvals(table[counted])
    torch.testing.assert_close(sigma * scale, true, rtol=1e-9, atol=1e-9)
    identity = torch.eye(7, dtype=torch.float64)
    torch.testing.assert_close(u[counted].t() @ u[counted], scale**2 * identity)
    torch.testing.assert_close(v.t() @ v, identity)


@pytest.mark.parametrize("scale", [1.0, 3.5])
def test_gradients_of_the_new_factors_follow_from_those_of_the_old(scale):
    """Against autograd at both, for a function of W."""
    target = torch.randn(123, 7, dtype=torch.float64)

    def gradients(*at):
        leaves = [one.detach().clone().requires_grad_() for one in at]
        ((dense(*leaves) - target).pow(3).sum() + dense(*leaves).sin().sum()).backward()
        return [leaf.grad for leaf in leaves]

    old = factors()
    new, at = renewed(*old, scale)
    of_u, _, of_v = gradients(*old)
    expected_u, expected_sigma, expected_v = gradients(*at)
    torch.testing.assert_close(of_u @ new.u_gradient, expected_u)
    torch.testing.assert_close(of_v @ new.v_gradient, expected_v)
    products = torch.einsum("nk,nk->k", at[0], of_u @ new.u_gradient)
    torch.testing.assert_close(products / new.sigma, expected_sigma)


def test_a_singular_value_of_zero_leaves_the_factors_as_they_are():
    u, sigma, v = factors()
    sigma[3] = 0
    assert redecomposition(sigma, v, singular_system(u, sigma, v)) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e200])
def test_factors_that_are_not_finite_are_refused(value):
    u, sigma, v = factors()
    u[5, 2] = value
    with pytest.raises(DataError, match="an SVD table of finite numbers"):
        redecomposition(sigma, v, singular_system(u, sigma, v))
