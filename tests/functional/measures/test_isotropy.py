import math

import pytest
import torch

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.linalg.row_norms import rms_row_norm
from spectral_fairseq.functional.linalg.singular_values import right_singular_system
from spectral_fairseq.functional.measures.effective_rank import effective_rank
from spectral_fairseq.functional.measures.mean_cosine import mean_cosine
from spectral_fairseq.functional.measures.partition_function import (
    isotropy_i1,
    isotropy_i2,
    log_partition,
    log_partitions,
)
from tests.reference import isotropy as naive


def measures(matrix, **options):
    log_z = log_partition(matrix, right_singular_system(matrix)[1], **options)
    return float(isotropy_i1(log_z)), float(isotropy_i2(log_z))


def random_table(n, d, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return (torch.randn(n, d, dtype=torch.float64) + torch.randn(d, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("n, d", [(7, 3), (37, 5), (12, 11), (3, 5)])
def test_naive_parity(n, d):
    matrix = random_table(n, d)
    z = naive.partitions_both_signs(matrix)
    if n >= d:  # otherwise the null space's basis is free
        assert measures(matrix) == pytest.approx((naive.i1(z), naive.i2(z)), rel=1e-10)
    sigma, directions = right_singular_system(matrix)
    expected = torch.linalg.svdvals(matrix)
    assert torch.allclose(sigma[: len(expected)], expected, rtol=1e-10)
    assert (sigma[len(expected) :] == 0).all()
    assert torch.allclose(directions.t() @ directions, torch.eye(d, dtype=torch.float64))
    assert torch.allclose((matrix @ directions).norm(dim=0), sigma, atol=1e-7)
    assert mean_cosine(matrix) == pytest.approx(naive.mean_cosine(matrix), rel=1e-10)
    assert effective_rank(sigma) == pytest.approx(naive.effective_rank(sigma.tolist()), rel=1e-9)


def test_float32_and_float16_tables_are_measured_in_float64():
    for dtype in (torch.float32, torch.float16):
        matrix = random_table(41, 6, dtype=dtype)
        assert measures(matrix) == pytest.approx(measures(matrix.double()), rel=1e-12)


def test_blocks_change_nothing():
    matrix = random_table(53, 7)
    sigma, directions = right_singular_system(matrix)
    in_blocks = right_singular_system(matrix, block_rows=5)
    assert torch.allclose(in_blocks[0], sigma, rtol=1e-12)
    whole = log_partition(matrix, directions)
    assert torch.allclose(log_partition(matrix, directions, block_rows=5), whole, rtol=1e-12)


def test_signed_identity_blocks_are_perfectly_isotropic():
    eye = torch.eye(4)
    i1, i2 = measures(torch.cat([eye, -eye]))
    assert i1 == pytest.approx(1, abs=1e-12)
    assert i2 == pytest.approx(0, abs=1e-12)


def test_identity_with_both_signs():
    # Z(e_k) = e + d - 1 and Z(-e_k) = 1/e + d - 1 for the standard basis.
    d = 4
    log_z = log_partition(torch.eye(d), torch.eye(d))
    high, low = math.e + d - 1, 1 / math.e + d - 1
    assert float(isotropy_i1(log_z)) == pytest.approx(low / high, rel=1e-12)
    assert float(isotropy_i2(log_z)) == pytest.approx((high - low) / (high + low), rel=1e-12)
    # One sign a direction: a table with d equal values of Z.
    assert float(isotropy_i1(log_z[0])) == pytest.approx(1)


def test_equal_rows_are_a_cone():
    # N copies of (3, 0): Z = N e^3, N e^-3, N, N.
    matrix = torch.tensor([[3.0, 0.0]]).expand(10, 2)
    i1, i2 = measures(matrix)
    z = [math.exp(3), math.exp(-3), 1.0, 1.0]
    assert i1 == pytest.approx(math.exp(-6), rel=1e-9)
    assert i2 == pytest.approx(naive.i2(z), rel=1e-9)
    assert mean_cosine(matrix) == pytest.approx(1, rel=1e-6)
    sigma, _ = right_singular_system(matrix)
    assert effective_rank(sigma) == pytest.approx(1)


def test_first_row_points_along_the_mean_whatever_the_solver_returned():
    matrix = random_table(29, 4, seed=3)
    _, directions = right_singular_system(matrix)
    flipped = directions * torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert torch.equal(log_partition(matrix, flipped), log_partition(matrix, directions))
    for k in range(4):
        a = directions[:, k]
        a = a if float((matrix @ a).sum()) >= 0 else -a
        z = [math.log(naive.partition(matrix, sign * a)) for sign in (1, -1)]
        assert log_partition(matrix, directions)[:, k].tolist() == pytest.approx(z, rel=1e-10)


def test_invariant_under_rotation_and_permutation_but_not_scale():
    matrix = random_table(31, 5, seed=1)
    q, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))
    for other in (matrix @ q, matrix[torch.randperm(31)]):
        assert measures(other) == pytest.approx(measures(matrix), rel=1e-9)
        assert mean_cosine(other) == pytest.approx(mean_cosine(matrix), rel=1e-9)
    assert measures(2 * matrix)[0] < measures(matrix)[0]
    unit = measures(matrix, scale=1 / rms_row_norm(matrix))
    assert measures(7 * matrix, scale=1 / rms_row_norm(7 * matrix)) == pytest.approx(unit, rel=1e-9)
    assert measures(matrix / rms_row_norm(matrix)) == pytest.approx(unit, rel=1e-9)


def test_large_rows_do_not_overflow():
    i1, i2 = measures(torch.cat([torch.eye(3), -torch.eye(3)]) * 2000)
    assert (i1, i2) == pytest.approx((1, 0), abs=1e-9)


def test_zero_row_counts_but_has_no_direction():
    matrix = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    assert mean_cosine(matrix) == pytest.approx(2 / 6)
    assert naive.mean_cosine(matrix) == pytest.approx(2 / 6)


def test_effective_rank_of_equal_values_is_their_number():
    assert effective_rank(torch.full((6,), 0.3)) == pytest.approx(6)
    assert effective_rank(torch.tensor([2.0, 0.0, 0.0])) == pytest.approx(1)
    assert effective_rank(torch.zeros(3)) == 0


def test_rms_row_norm():
    assert rms_row_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]])) == pytest.approx(math.sqrt(12.5))


def test_no_gradient_is_recorded():
    matrix = random_table(9, 3).requires_grad_()
    sigma, directions = right_singular_system(matrix)
    assert not sigma.requires_grad
    assert not log_partition(matrix, directions).requires_grad


@pytest.mark.parametrize(
    "matrix, found",
    [
        (torch.zeros(3), r"shape \(3,\)"),
        (torch.zeros(0, 4), r"shape \(0, 4\)"),
        (torch.tensor([[1.0, float("nan")]]), "NaN"),
        (torch.tensor([[1.0, float("inf")]]), "NaN"),
    ],
)
def test_what_is_no_table_is_refused(matrix, found):
    with pytest.raises(DataError, match=found):
        right_singular_system(matrix)


def test_one_row_has_no_mean_cosine():
    with pytest.raises(DataError, match="two rows"):
        mean_cosine(torch.ones(1, 3))


def test_several_scales_at_once():
    matrix = random_table(53, 7)
    directions = right_singular_system(matrix)[1]
    scales = (1.0, 0.1, 250.0)  # the last is beyond what one exponential can hold
    found = log_partitions(matrix, directions, scales, block_rows=11)
    for log_z, scale in zip(found, scales):
        expected = torch.stack(
            [torch.logsumexp(sign * scale * (matrix @ directions), 0) for sign in (1, -1)]
        )
        forward = (matrix @ directions).sum(0) >= 0
        expected = torch.where(forward, expected, expected.flip(0))
        assert torch.allclose(log_z, expected, rtol=1e-12)
        alone = log_partition(matrix, directions, scale=scale)
        assert torch.allclose(log_z, alone, rtol=1e-12)


@pytest.mark.parametrize("d", [65, 200, 513])
def test_wide_tables_in_strips(d):
    matrix = random_table(d + 9, d)
    sigma, directions = right_singular_system(matrix, block_rows=100)
    assert torch.allclose(sigma, torch.linalg.svdvals(matrix), rtol=1e-6)
    assert torch.allclose((matrix @ directions).norm(dim=0), sigma, atol=1e-6)


def test_z_in_float32_keeps_five_digits():
    matrix = 5 * random_table(5000, 7, dtype=torch.float32)
    directions = right_singular_system(matrix)[1]
    scales = (1.0, 0.1, 40.0)  # the last is beyond what one exponential of float32 can hold
    exact = log_partitions(matrix, directions, scales)
    narrow = log_partitions(matrix, directions, scales, dtype=torch.float32)
    assert not torch.equal(narrow, exact)
    assert torch.allclose(narrow, exact, rtol=1e-6, atol=1e-5)


def test_progress_counts_rows():
    matrix, heard = random_table(53, 7), []
    _, directions = right_singular_system(matrix, block_rows=20, progress=heard.append)
    log_partitions(matrix, directions, (1.0,), block_rows=30, progress=heard.append)
    assert heard == [20, 20, 13, 30, 23]
