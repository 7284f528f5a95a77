"""Words that are never predicted, the lost gradient, and the hull of hidden states."""

import math
from itertools import product

import pytest
import torch

from spectral_fairseq.functional.predictions import (
    ArgmaxWords,
    GradientBottleneck,
    hull_probability,
    separate,
)
from tests.reference.gradient_bottleneck import lost_gradient


def test_words_that_are_never_predicted():
    words = ArgmaxWords(6, torch.tensor([0]))
    words.add(torch.eye(6)[[1, 2, 2]], torch.tensor([1, 3, 4]))
    words.add(torch.eye(6)[[4]], torch.tensor([0]))
    assert words.never() == 2  # 3 and 5: row 0 stands for no word
    assert words.missed_targets() == 1  # 3


@pytest.mark.parametrize("rank", [5, 3])
def test_lost_gradient_against_the_projector(rank):
    torch.manual_seed(0)
    weight = torch.randn(31, rank).double() @ torch.randn(rank, 5).double()
    logits, targets = 2 * torch.randn(40, 31).double(), torch.randint(31, (40,))
    measure = GradientBottleneck(weight)
    for some, y in zip(logits.split(7), targets.split(7)):
        measure.add(some.log_softmax(1), y)
    assert measure.lost() == pytest.approx(lost_gradient(weight, logits, targets))


def test_a_square_head_loses_only_what_no_state_can_reach():
    torch.manual_seed(0)
    measure = GradientBottleneck(torch.randn(6, 6).double())
    measure.add(torch.randn(9, 6).double().log_softmax(1), torch.randint(6, (9,)))
    assert measure.lost() == pytest.approx(0, abs=1e-9)


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
