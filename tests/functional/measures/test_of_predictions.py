"""The hull of hidden states."""

import math
from itertools import product

import pytest
import torch

from spectral_fairseq.functional.predictions import (
    hull_probability,
    separate,
)


def test_the_hull_of_a_cube():
    corners = torch.tensor(list(product((-1.0, 1.0), repeat=3)))
    for point in ((0, 0, 0), (0.9, -0.9, 0.9), (1, 1, 1)):
        assert separate(corners, torch.tensor(point).float()).inside
    for point in ((1.1, 0, 0), (1.01, -1.01, 1.01)):
        found = separate(corners, torch.tensor(point).float())
        assert not found.inside
        assert ((corners.double() - torch.tensor(point).double()) @ found.direction < 0).all()


@pytest.mark.slow
def test_wendels_probability():
    assert hull_probability(3, 3) == 0
    assert hull_probability(2000, 1000) == pytest.approx(0.5, abs=0.01)
    torch.manual_seed(0)
    hits = sum(separate(torch.randn(5, 2), torch.zeros(2)).inside for _ in range(300))
    assert hits / 300 == pytest.approx(hull_probability(5, 2), abs=3 * math.sqrt(0.25 / 300))
