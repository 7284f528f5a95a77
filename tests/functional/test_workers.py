"""Workers that hold the same table change it alike."""

import pytest
import torch

from spectral_fairseq.functional.table_control import apply_change_, plan_change
from spectral_fairseq.functional.workers import Workers
from tests.reference import spectra as reference
from tests.workers import on_two_workers


def table():
    """Columns of different lengths and a mean that is not zero, shape (50, 6)."""
    matrix = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    return matrix * torch.linspace(3, 1, 6) + 0.4


def _planned_by_the_first(rank):
    weight = table()
    workers, change = Workers(torch.distributed.group.WORLD), None
    assert workers.plans == (rank == 0), "only the first worker's eigensolver may decide"
    if workers.plans:
        change = plan_change(weight, torch.ones(6), 0.5, slack=1.5, centering=0.1)
    apply_change_(weight, workers.share_change(change, weight))
    return weight


@pytest.mark.slow
def test_all_workers_carry_out_the_plan_of_the_first(tmp_path):
    first, second = on_two_workers(_planned_by_the_first, tmp_path)
    assert torch.equal(first, second)
    before = table()
    expected = reference.controlled(before, torch.ones(6), 0.5, "above", 1.5, "free", 0.1)
    torch.testing.assert_close(first.double(), expected, rtol=1e-5, atol=1e-6)
