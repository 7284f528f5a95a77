"""The matrix product of the blockwise losses, by the fastest kernel of equal precision.

Note [Products through oneDNN]
------------------------------
The products take nine tenths of the time of a blockwise loss. In float32 on a CPU ``torch.mm`` uses
MKL, which on processors of other vendors is limited to AVX2: about 100 GFLOP/s for each core of an
AVX-512 Zen 5, where the oneDNN that is compiled into the same torch reaches 220. ``torch.compile``
calls it through the operator below; a direct call needs no compiler. The operator is not part of
torch's stable interface, so its presence is checked once, and ``torch.mm`` is the fallback.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor


def _find_onednn_linear() -> Optional[Any]:
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        linear = torch.ops.mkldnn._linear_pointwise.default
        ones = torch.ones(2, 2)
        with torch.no_grad():
            # Notices a later torch in which the signature or the meaning has changed.
            works = torch.equal(linear(ones, ones, None, "none", [], ""), 2 * ones)
    except (AttributeError, RuntimeError, TypeError):
        return None
    return linear if works else None


_ONEDNN_LINEAR = _find_onednn_linear()


def matmul_transposed(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right.t(), computed outside autograd.

    Args:
        left: shape (m, k).
        right: shape (n, k), of the same dtype; either may be a transposed view.

    Returns:
        Shape (m, n).
    """
    if (
        _ONEDNN_LINEAR is not None
        and left.dtype == torch.float32
        and left.device.type == "cpu"
        and left.numel() > 0
        and torch.backends.mkldnn.enabled
    ):
        return _ONEDNN_LINEAR(left, right, None, "none", [], "")
    return torch.mm(left, right.t())
