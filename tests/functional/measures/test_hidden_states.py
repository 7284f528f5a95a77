import pytest
import torch

from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.predictions import StateStatistics
from tests.reference import isoscore as naive_isoscore
from tests.reference import isotropy as naive


def test_against_the_naive_forms():
    torch.manual_seed(0)
    states = torch.randn(47, 9) + 0.5
    states[4] = 0
    statistics = StateStatistics(9)
    for block in states.split(10):
        statistics.add(block)
    assert statistics.mean_cosine() == pytest.approx(naive.mean_cosine(states))
    assert statistics.isoscore() == pytest.approx(naive_isoscore.isoscore(states.double()))
    with pytest.raises(DataError):
        StateStatistics(3).mean_cosine()
