import pytest
import torch

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.isotropy import hubness
from tests.reference import hubness as naive


@pytest.mark.parametrize("n, d, k", [(61, 7, 5), (40, 3, 10)])
def test_against_all_cosines(n, d, k):
    torch.manual_seed(0)
    rows = torch.randn(n, d, dtype=torch.float64) + 0.5
    assert hubness(rows, k) == pytest.approx(naive.hubness(rows, k))


def test_a_hub_and_a_ring():
    # On a ring all words are alike. Of orthogonal words the sum is the nearest neighbour of all.
    angles = torch.arange(24) / 24 * 2 * torch.pi
    ring = torch.stack([angles.cos(), angles.sin()], 1).double()
    assert abs(hubness(ring, 2)) < 1e-9
    petals = torch.cat([torch.eye(12).double(), torch.ones(1, 12).double()])
    assert hubness(petals, 1) > 3
    with pytest.raises(DataError):
        hubness(ring[:1])
