"""Attention on a CPU beside products that go through oneDNN (``float32_products.py``).

torch's flash attention for CPUs makes many small products, which lose more in oneDNN than all
others gain, in float32 and always in bfloat16. Here attention takes the form that is fastest, by
the length of the sequences. Forward and backward over torch's flash kernel with MKL, float32, one
thread of an AMD EPYC (``python -m benchmarks.bench_products --only attention``):

    heads x width  length  flash, oneDNN  without flash, oneDNN
    4 x 32             24            5.7                   0.82
    4 x 32            128            4.5                    1.9
    8 x 64             48            5.3                   0.76
    8 x 64             96            3.3                    1.4
    8 x 64            256            1.7                    1.9

Short sequences therefore take two batched products and a softmax, and long ones the flash kernel
with MKL's products. bfloat16 has no products in MKL: there the long ones are computed in float32.

On an Intel processor with AMX, MKL is fast, and only bfloat16 loses. Forward and backward over the
flash kernel in bfloat16, one thread of a Xeon with AMX:

    heads x width  length  without flash  flash, in float32
    4 x 32             16           0.12               0.10
    4 x 32            128           0.52               0.35
    4 x 32            256           1.29               0.69
    8 x 64             64           0.56               0.51
    8 x 64            256           2.13               1.15
    8 x 64            512           3.26               1.45

So there short sequences in half precision are computed in float32, and all others as torch comes.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

# Length from which the flash kernel with MKL is faster than batched products in oneDNN.
LONG = 64
# Length from which, with AMX, the flash kernel is as fast in half precision as in float32.
LONG_WITH_AMX = 256
_HALVES = (torch.float16, torch.bfloat16)
_FLASH = "ScaledDotProductFlashAttentionForCpu"


def has_flash_kernel() -> bool:
    """Whether this process computes on a CPU, with a torch whose flash kernel can be chosen."""
    knows_compilers = hasattr(getattr(torch, "compiler", None), "is_compiling")  # torch 2.1
    return knows_compilers and not torch.cuda.is_available()


class _WithMKL:
    """Float32 products through MKL, and the flash kernel, inside the block.

    Args:
        matmul: ``torch.backends.mkldnn.matmul``; ``None`` where float32 products are MKL's anyway.
        flash: whether the flash kernel is on outside of the block.
    """

    def __init__(self, matmul: Any, flash: bool = False) -> None:
        self.matmul, self.flash, self.before = matmul, flash, ""

    def __enter__(self) -> None:
        torch.backends.cuda.enable_flash_sdp(True)
        if self.matmul is not None:
            self.before, self.matmul.fp32_precision = self.matmul.fp32_precision, "ieee"

    def __exit__(self, *_: Any) -> None:
        torch.backends.cuda.enable_flash_sdp(self.flash)
        if self.matmul is not None:
            self.matmul.fp32_precision = self.before


def _by_length(original: Callable[..., Tensor], matmul: Any, amx: bool) -> Callable[..., Tensor]:
    with_mkl = _WithMKL(matmul, flash=amx)

    def as_set(query: Tensor, key: Tensor) -> bool:
        """Whether attention is fastest in the kernel and the precision that are set."""
        area = query.size(-2) * key.size(-2)
        if amx:
            return query.dtype not in _HALVES or area >= LONG_WITH_AMX**2
        return query.dtype == torch.float64 or area < LONG**2

    @functools.wraps(original)
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Optional[Tensor] = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        # The kernel knows no dropout, and a compiler decides by itself.
        if as_set(query, key) or dropout_p or torch.compiler.is_compiling():
            return original(query, key, value, attn_mask, dropout_p, *args, **kwargs)
        dtype = query.dtype
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.float()
        inputs = (query.float(), key.float(), value.float(), attn_mask, dropout_p)
        with torch.autocast("cpu", enabled=False), with_mkl:
            found = original(*inputs, *args, **kwargs)
        node: Any = found.grad_fn
        if matmul is not None and node is not None and node.name().startswith(_FLASH):
            # The backward pass is one node of the graph, and makes the same small products.
            node.register_prehook(lambda _: with_mkl.__enter__())
            node.register_hook(lambda *_: with_mkl.__exit__())
        return found.to(dtype)

    attention.is_chosen_by_length = True  # type: ignore[attr-defined]
    return attention


def choose_attention(matmul: Any, amx: bool = False) -> Callable[[], None]:
    """Let attention take the form that is fastest beside oneDNN, in this process.

    Args:
        matmul: ``torch.backends.mkldnn.matmul`` where float32 products go through oneDNN.
        amx: choose for an Intel processor with AMX, whose products of float32 are MKL's.

    Returns:
        A function that puts everything back as it was found.
    """
    original: Any = F.scaled_dot_product_attention
    if not torch.backends.cuda.flash_sdp_enabled() or hasattr(original, "is_chosen_by_length"):
        return lambda: None
    torch.backends.cuda.enable_flash_sdp(amx)
    F.scaled_dot_product_attention = _by_length(original, matmul, amx)

    def restore() -> None:
        F.scaled_dot_product_attention = original
        torch.backends.cuda.enable_flash_sdp(True)

    return restore
