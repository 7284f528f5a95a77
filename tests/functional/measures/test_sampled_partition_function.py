import functools

import pytest
import torch

from spectral_fairseq.analysis import analyze, table_facts
from spectral_fairseq.functional import isotropy
from spectral_fairseq.functional.isotropy import (
    TOLERANCE,
    RowMoments,
    is_worth_sampling,
    log_partitions,
    sampled_log_partitions,
)
from spectral_fairseq.functional.spectra import right_singular_system

SCALES = (1.0, 0.5)


def table(rows=4000, dim=12, length=0.1):
    torch.manual_seed(1)
    return (torch.randn(rows, dim, dtype=torch.float64) + 0.3) * length / dim**0.5


def estimate_and_truth(matrix, **options):
    sigma, directions = right_singular_system(matrix)
    moments = RowMoments(matrix.mean(0), sigma, matrix.norm(dim=1))
    estimate = sampled_log_partitions(matrix, directions, SCALES, moments, **options)
    return estimate, log_partitions(matrix, directions, SCALES)


def measures(matrix):
    (checkpoint,) = analyze(matrix).to_dict()["checkpoints"]
    return checkpoint["measures"]


def refuse(*_, **__):
    raise AssertionError("all rows were read")


def test_a_sample_estimates_short_rows_within_the_tolerance(monkeypatch):
    monkeypatch.setattr(isotropy, "log_partitions", refuse)
    estimate, truth = estimate_and_truth(table(), rows=1000)
    error = (estimate - truth).abs().max()
    assert 0 < error < 5 * TOLERANCE
    # The measures differ between directions by far more than the error.
    assert truth.std() > 100 * error


def test_directions_that_vary_too_much_are_computed_from_all_rows():
    matrix = table()
    matrix[:, 0] *= 30
    estimate, truth = estimate_and_truth(matrix, rows=1000)
    assert (estimate - truth).abs().max() < 5 * TOLERANCE
    assert torch.equal(estimate[:, :, 0], log_partitions(matrix, first(matrix), SCALES)[..., 0])


def first(matrix):
    return right_singular_system(matrix)[1][:, :1]


@pytest.mark.parametrize("length", [30.0, 3000.0])
def test_long_rows_overflow_nothing(length):
    estimate, truth = estimate_and_truth(table(length=length), rows=1000)
    assert torch.equal(estimate, truth)


@pytest.mark.parametrize("row", [3, 2718])
def test_a_single_long_row_is_never_missed(row, monkeypatch):
    monkeypatch.setattr(isotropy, "log_partitions", refuse)
    matrix = table(length=0.03)
    matrix[row] = 0.8 * torch.nn.functional.normalize(matrix.mean(0), dim=0)
    estimate, truth = estimate_and_truth(matrix, rows=1000)
    assert (estimate - truth).abs().max() < 5 * TOLERANCE


def test_only_tables_with_many_products_are_sampled():
    assert is_worth_sampling(128_256, 4096)
    assert not is_worth_sampling(267_735, 1024)
    assert not is_worth_sampling(32_000, 8192)


def test_progress_counts_all_rows():
    done = []
    matrix = table()
    sigma, directions = right_singular_system(matrix)
    moments = RowMoments(matrix.mean(0), sigma, matrix.norm(dim=1))
    sampled_log_partitions(matrix, directions, SCALES, moments, rows=1000, progress=done.append)
    assert sum(done) == 4000


def test_an_analysis_by_samples_finds_the_same(monkeypatch):
    matrix = table().float()
    exact = measures(matrix)
    monkeypatch.setattr(table_facts, "is_worth_sampling", lambda rows, dim: True)
    fewer_rows = functools.partial(sampled_log_partitions, rows=1000)
    monkeypatch.setattr(table_facts, "sampled_log_partitions", fewer_rows)
    sampled = measures(matrix)
    names = [name for name in exact if name.startswith(("i1", "i2"))]
    assert len(names) == 8
    for name in names:
        expected = pytest.approx(exact[name], rel=1e-2 if "i2" in name else 1e-4)
        assert sampled[name] == expected
