"""The whole matrix on a real CUDA device, against the CPU: ``pytest -m gpu``."""

import pytest
import torch

from tests.cuda.matrix import cases
from tests.cuda.parity import BOUNDS, compare

CASES = cases() if torch.cuda.is_available() else ()


@pytest.mark.gpu
@pytest.mark.parametrize("model, criterion, precision", CASES)
def test_loss_and_gradients_are_those_of_the_cpu(model, criterion, precision):
    found = compare(model, criterion, precision, "cuda")
    assert found.loss <= BOUNDS[precision] and found.gradient <= 2 * BOUNDS[precision], found
