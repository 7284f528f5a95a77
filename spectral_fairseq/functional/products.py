"""The matrix product of the blockwise losses, by the fastest kernel of equal precision.

Note [Products through oneDNN]
------------------------------
The products take nine tenths of the time of a blockwise loss. In float32 on a CPU ``torch.mm`` uses
MKL, which on processors of other vendors is limited to AVX2: about 100 GFLOP/s for each core of an
AVX-512 Zen 5, where the oneDNN that is compiled into the same torch reaches 220. ``torch.compile``
calls it through the operator below; a direct call needs no compiler. The operator is not part of
torch's stable interface, so its presence is checked once, and ``torch.mm`` is the fallback.

The operator copies its first factor if that is a transposed view, such as the scores in the product
for the gradient of the table: a tenth of an update of a narrow model. It reads a transposed second
factor in place. ``add_matmul_transposed_`` therefore computes the transposed product; adding that
is slower, so it needs as many rows as would outweigh the width of the table.

Note [Products with wide results]
---------------------------------
The tensor cores of a GPU multiply float16 and bfloat16 numbers and add in float32. Later versions
of torch return the float32 sums (``out_dtype``) instead of rounding them: the scores of a softmax
then have neither the range of float16 nor the resolution of bfloat16. Whether a device has such
products is tried once.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Iterator, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spectral_fairseq.functional.precision import HALVES


def _find_onednn_linear() -> Optional[Any]:
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        linear = torch.ops.mkldnn._linear_pointwise.default
        ones = torch.ones(2, 2, dtype=torch.float32, device="cpu")
        with torch.no_grad():
            # Notices a later torch in which the signature or the meaning has changed.
            works = torch.equal(linear(ones, ones, None, "none", [], ""), 2 * ones)
    except (AttributeError, RuntimeError, TypeError):
        return None
    return linear if works else None


_ONEDNN_LINEAR = _find_onednn_linear()


def has_wide_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether products of ``dtype`` on ``device`` have float32 results.

    See Note [Products with wide results].
    """
    return device.type == "cuda" and _tried_wide_products(dtype, device)


@cache
def _tried_wide_products(dtype: torch.dtype, device: torch.device) -> bool:
    if dtype not in HALVES:
        return False
    factor = torch.full((8, 8), 128.0, dtype=dtype, device=device)
    total = torch.ones(8, 8, dtype=torch.float32, device=device)
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            # 131,072 is out of the range of float16, and 131,073 between two bfloat16 numbers.
            product = torch.mm(factor, factor, out_dtype=torch.float32)
            torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # RuntimeError includes NotImplementedError
        return False
    return bool((product.eq(8 * 128**2) & total.eq(8 * 128**2 + 1)).all())


def _takes_onednn(left: Tensor) -> bool:
    return (
        _ONEDNN_LINEAR is not None
        and left.dtype == torch.float32
        and left.device.type == "cpu"
        and left.numel() > 0
        and bool(torch.backends.mkldnn.enabled)
    )


def matmul_transposed(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right.t(), computed outside autograd.

    Args:
        left: shape (m, k).
        right: shape (n, k), of the same dtype; either may be a transposed view.

    Returns:
        Shape (m, n), float32 where there are such products of half precision.
    """
    if _takes_onednn(left):
        return _ONEDNN_LINEAR(left, right, None, "none", [], "")  # type: ignore[misc]
    if has_wide_products(left.dtype, left.device):
        return torch.mm(left, right.t(), out_dtype=torch.float32)
    return torch.mm(left, right.t())


def matmul_transposed_by_rows(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return left @ right.t() of bfloat16 in ``dtype``, some rows at a time, outside autograd.

    A large one takes 0.9 of the time so, since oneDNN's copies of its factors are small.

    Args:
        left: shape (m, k).
        right: shape (n, k); either may be a transposed view.
        dtype: of the result, shape (m, n).
    """
    found = left.new_empty((left.size(0), right.size(0)), dtype=dtype)
    for part, factor in _by_rows(found, left):
        if part.dtype == left.dtype:
            torch.mm(factor, right.t(), out=part)
        else:
            part.copy_(torch.mm(factor, right.t()))
    return found


# Up to so many columns of the factors a CPU adds faster within the product than after it: in 0.4
# to 1.0 of the time, and in 1.0 to 1.2 with more (n = 64 to 1,024, m = 4,000 and 32,000).
ADDED_WITHIN = 512
# Bytes of a product of bfloat16 that a CPU computes at a time. The C library maps more than 32 MiB
# anew at each call, page by page. By parts, a product that is added takes 0.58 to 0.76 of the time,
# and one that is not takes 0.9 (N = 32,000 to 150,000, d = 512 to 896).
AT_ONCE = 16 * 1024 * 1024


def add_matmul_transposed_(
    total: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0, first: bool = False
) -> None:
    """Add alpha left @ right.t() to ``total``, computed outside autograd.

    Args:
        total: shape (m, n), changed in place.
        left: shape (m, k).
        right: shape (n, k), of the same dtype; either may be a transposed view.
        alpha: factor of the product.
        first: whether it is the first addend, and overwrites ``total``, whatever lies there.
    """
    wide = has_wide_products(left.dtype, left.device)
    if wide or (left.dtype == total.dtype and (left.is_cuda or left.size(1) <= ADDED_WITHIN)):
        if first:  # quicker than a product that overwrites: it meets new memory page by page
            total.zero_()
        if wide:
            torch.addmm(total, left, right.t(), out_dtype=torch.float32, alpha=alpha, out=total)
        else:
            total.addmm_(left, right.t(), alpha=alpha)
        return
    if _takes_onednn(left) and left.stride(0) == 1 and 1 < right.size(0) <= 2 * left.size(1):
        _add(total, matmul_transposed(right, left).t(), alpha, first)
        return
    for part, factor in _by_rows(total, left):
        _add(part, matmul_transposed(factor, right), alpha, first)


def _by_rows(product: Tensor, left: Tensor) -> Iterator[Tuple[Tensor, Tensor]]:
    """Yield parts of a product and of its left factor: several in bfloat16 on a CPU, else one."""
    rows = left.size(0)
    if left.device.type == "cpu" and left.dtype == torch.bfloat16:
        rows = max(1, AT_ONCE // (2 * max(1, product.size(1))))
    yield from zip(product.split(rows), left.split(rows))


def _add(total: Tensor, addend: Tensor, alpha: float, first: bool) -> None:
    if not first:
        total.add_(addend, alpha=alpha)
        return
    total.copy_(addend)
    if alpha != 1:
        total.mul_(alpha)


def linear(features: Tensor, matrix: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """``F.linear`` as one product of matrices, whatever the order in memory.

    Without gradients torch may multiply features that are not in order by a copy of the matrix for
    each of their first dimension, which fairseq's decoders give: for V = 9,992 and d = 512 that is
    10 MB for each row of a step of beam search in bfloat16.

    Args:
        features: shape (*, d).
        matrix: shape (N, d).
        bias: shape (N,).

    Returns:
        Shape (*, N).
    """
    rows = features.reshape(-1, features.size(-1))
    return F.linear(rows, matrix, bias).view(list(features.shape[:-1]) + [matrix.size(0)])
