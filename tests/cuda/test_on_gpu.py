"""The whole matrix on a real CUDA device, against the CPU: ``pytest -m gpu``."""

import pytest
import torch

from tests.cuda.matrix import CRITERIONS, MODELS, PRECISIONS
from tests.cuda.parity import BOUNDS, compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("criterion", CRITERIONS)
@pytest.mark.parametrize("model", MODELS)
def test_loss_and_gradients_are_those_of_the_cpu(model, criterion, precision):
    found = compare(model, criterion, precision, "cuda")
    if found is not None:
        assert found.loss <= BOUNDS[precision] and found.gradient <= 2 * BOUNDS[precision], found
