"""Products, sums and norms that keep their digits, whatever the user has allowed torch to do."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import ContextManager, Iterator

import torch
from torch import Tensor

from spectral_fairseq.functional.processor import has_amx
from spectral_fairseq.functional.settings import CUDA, FLOAT32, ONEDNN, has_onednn_setting

HALVES = (torch.float16, torch.bfloat16)  # types of half precision


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Switch autocast, TF32 and its like off inside the block, for products on ``device``.

    TF32 rounds the factors to 11 bits, autocast to bfloat16 to 8. A Gram matrix would then be known
    to 5e-4 of its largest entry, or worse: far less than ``spectra.py``, Note [Roundoff of
    a Gram matrix], counts on.
    """
    with torch.autocast(device.type, enabled=False):
        with _without_tf32() if device.type == "cuda" else _without_rounding_of_onednn():
            yield


def _without_rounding_of_onednn() -> ContextManager[None]:
    """With AMX, oneDNN rounds float32 factors where ``--float32-products fast`` allows it to."""
    if not has_amx():
        return nullcontext()
    return (ONEDNN if has_onednn_setting() else FLOAT32).held()


def _without_tf32() -> ContextManager[None]:
    try:
        torch.get_float32_matmul_precision()
    except RuntimeError:  # the user has set the newer fp32_precision, and torch refuses a mixture
        return CUDA.held()
    return FLOAT32.held()


def type_of_products(like: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the type of products of a type, which autocast may make another, on a device.

    Args:
        like: a tensor on the device.
        dtype: of the factors.
    """
    # A product of two scalars shows it, for every device and version of torch.
    probe = like.new_zeros(1, 1, dtype=dtype)
    return torch.mm(probe, probe).dtype


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums and products of a type keep their digits."""
    return torch.promote_types(dtype, torch.float32)


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 at least."""
    return tensor.to(at_least_float32(tensor.dtype))
