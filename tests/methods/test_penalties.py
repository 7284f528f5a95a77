"""What penalties have in common, whoever trains with them."""

import torch

from spectral_fairseq.methods.penalties import PerDevice


def test_a_constant_that_was_copied_in_inference_can_be_trained_with():
    """Lightning validates in inference mode, whose tensors no backward pass takes."""
    constant = PerDevice(torch.tensor([1], device="cpu"))
    with torch.inference_mode():
        copied = constant.on(torch.device("meta"))
    assert not copied.is_inference() and constant.on(torch.device("meta")) is copied
