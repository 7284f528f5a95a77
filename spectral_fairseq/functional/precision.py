"""Products and sums of float32 numbers in float32, whatever the user has allowed torch to do."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator

import torch
from torch import Tensor

from spectral_fairseq.functional.processor import has_amx

HALVES = (torch.float16, torch.bfloat16)  # types of half precision


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Switch autocast, TF32 and its like off inside the block, for products on ``device``.

    TF32 rounds the factors to 11 bits, autocast to bfloat16 to 8. A Gram matrix would then be known
    to 5e-4 of its largest entry, or worse: far less than ``spectra.py``, Note [Roundoff of
    a Gram matrix], counts on.
    """
    with torch.autocast(device.type, enabled=False):
        if device.type == "cuda":
            with _without_tf32():
                yield
        else:
            with _without_rounding_of_onednn():
                yield


@contextmanager
def _without_rounding_of_onednn() -> Iterator[None]:
    """With AMX, oneDNN rounds float32 factors where ``--float32-products fast`` allows it to."""
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    before = getattr(matmul, "fp32_precision", "none")
    if before == "none" or not has_amx():
        yield
        return
    with _in_ieee(matmul):
        yield


@contextmanager
def _in_ieee(matmul: Any) -> Iterator[None]:
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@contextmanager
def _without_tf32() -> Iterator[None]:
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user has set the newer fp32_precision, and torch refuses a mixture
        with _in_ieee(torch.backends.cuda.matmul):
            yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 at least, in which sums and products keep their digits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
