"""Products of float32 numbers in float32, whatever the user has allowed torch to do."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

import torch


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Switch autocast and TF32 off inside the block, for products on ``device``.

    TF32 rounds the factors to 11 bits, autocast to bfloat16 to 8. A Gram matrix would then be known
    to 5e-4 of its largest entry, or worse: far less than ``singular_values.py``, Note [Roundoff of
    a Gram matrix], counts on.
    """
    with torch.autocast(device.type, enabled=False):
        if device.type == "cuda":
            with _without_tf32():
                yield
        else:
            yield


@contextmanager
def _without_tf32() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user has set the newer fp32_precision, and torch refuses a mixture
        newer = matmul.fp32_precision
        matmul.fp32_precision = "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = newer
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
