import pytest
import torch

from spectral_fairseq.functional.ranks import effective_rank
from tests.reference import isotropy as naive


@pytest.mark.parametrize("d", [1, 3, 11])
def test_naive_parity(d):
    sigma = torch.rand(d, generator=torch.Generator().manual_seed(d), dtype=torch.float64)
    assert effective_rank(sigma) == pytest.approx(naive.effective_rank(sigma.tolist()), rel=1e-9)


def test_effective_rank_of_equal_values_is_their_number():
    assert effective_rank(torch.full((6,), 0.3)) == pytest.approx(6)
    assert effective_rank(torch.tensor([2.0, 0.0, 0.0])) == pytest.approx(1)
    assert effective_rank(torch.zeros(3)) == 0
