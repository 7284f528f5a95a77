"""Attention on a CPU beside products that go through oneDNN.

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

Short sequences therefore take batched products and a softmax, and long ones the flash kernel with
MKL's products. bfloat16 has no products in MKL: there the long ones are computed in float32.

In half precision the short ones take the products of `attention_weights`. On an Intel processor
with AMX, MKL is fast, and only half precision loses. Forward and backward of these products over
the flash kernel in bfloat16, and over that kernel in float32 with its conversions, one thread of
a Xeon with AMX:

    heads x width  length  over bfloat16  over float32
    4 x 32             16           0.10          0.65
    4 x 128            32           0.45          0.59
    8 x 64             64           0.33          0.51
    8 x 64            128           0.37          0.52
    8 x 64            192           0.95          0.88
    8 x 64            256           0.99          0.81

So there short sequences in half precision take them, and all others are as torch comes.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spectral_fairseq.functional.autograd import is_transformed
from spectral_fairseq.functional.precision import HALVES, at_least_float32, type_of_products
from spectral_fairseq.functional.settings import FLASH, ONEDNN, has_onednn_setting

# Length from which the flash kernel with MKL is faster than batched products in oneDNN.
LONG = 64
# Length from which, with AMX, the flash kernel in half precision is faster than products.
LONG_WITH_AMX = 192
_FLASH = "ScaledDotProductFlashAttentionForCpu"


def has_flash_kernel() -> bool:
    """Whether this process computes on a CPU, with a torch whose flash kernel can be chosen."""
    knows_compilers = hasattr(getattr(torch, "compiler", None), "is_compiling")  # torch 2.1
    return knows_compilers and not torch.cuda.is_available()


def _begin(*_: Any) -> None:
    """Begin a call that takes the flash kernel, with float32 products through MKL."""
    FLASH.enter()
    if has_onednn_setting():
        ONEDNN.enter()


def _end(*_: Any) -> None:
    if has_onednn_setting():
        ONEDNN.leave()
    FLASH.leave()


class _AttentionWeights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, mask: Optional[Tensor], scale: float
    ) -> Tensor:
        wide = at_least_float32(query.dtype)
        scores = (query.to(wide) @ key.to(wide).transpose(-2, -1)).mul_(scale)
        if mask is None:
            weights = scores.softmax(-1)
        elif mask.dtype == torch.bool:
            weights = scores.masked_fill_(~mask, -torch.inf).softmax(-1)
            weights.masked_fill_(~mask.any(-1, keepdim=True), 0.0)
        else:
            weights = scores.add_(mask).softmax(-1)
            weights.masked_fill_(mask.amax(-1, keepdim=True) == -torch.inf, 0.0)
        weights = weights.to(query.dtype)
        ctx.save_for_backward(query, key, weights)
        ctx.scale = scale
        return weights

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tuple[Tensor, Tensor, None, None]:
        query, key, weights = ctx.saved_tensors
        scores = torch._softmax_backward_data(upstream, weights, -1, weights.dtype).mul_(ctx.scale)
        return scores @ key, scores.transpose(-2, -1) @ query, None, None


def attention_weights(
    query: Tensor, key: Tensor, mask: Optional[Tensor] = None, scale: Optional[float] = None
) -> Tensor:
    """Return the weights of attention in half precision, from scores in float32.

    The error depends on the precision of the scores. With scores in bfloat16 the output and the
    gradients have two to five times the error of torch's flash kernel, and with scores in float32
    0.9 to 1.5 times. The backward pass takes products of half precision.

    Args:
        query: ``(..., L, D)``, in half precision.
        key: ``(..., S, D)``, of the type of ``query``.
        mask: boolean, true where a key is seen, or added to the scores; it broadcasts to
            ``(..., L, S)``. A query that sees no key has the weights zero, as in torch.
        scale: factor of the scores; 1 / sqrt(D) by default.

    Returns:
        ``(..., L, S)``, in the type of ``query``.
    """
    if scale is None:
        scale = query.size(-1) ** -0.5
    with torch.autocast("cpu", enabled=False):
        weights: Tensor = _AttentionWeights.apply(query, key, mask, scale)  # type: ignore[no-untyped-call]
    return weights


def _by_length(original: Callable[..., Tensor], amx: bool) -> Callable[..., Tensor]:
    long = LONG_WITH_AMX if amx else LONG

    @functools.wraps(original)
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Optional[Tensor] = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        # A compiler decides by itself; nested tensors have no size; transforms need an operator.
        if torch.compiler.is_compiling() or query.is_nested or is_transformed():
            return original(query, key, value, attn_mask, dropout_p, is_causal, **options)
        half, short = query.dtype in HALVES, query.size(-2) * key.size(-2) < long**2
        if half and short and _has_weights(query, key, value, attn_mask, is_causal):
            if is_causal:
                size = (query.size(-2), key.size(-2))
                attn_mask = torch.ones(size, dtype=torch.bool, device=query.device).tril()
            # Three products read each of them, and would copy it each time.
            query, key, value = (one.contiguous() for one in (query, key, value))
            weights = attention_weights(query, key, attn_mask, options.get("scale"))
            return F.dropout(weights, dropout_p) @ value
        # The kernel knows no dropout.
        if amx or short or dropout_p or query.dtype == torch.float64:
            return original(query, key, value, attn_mask, dropout_p, is_causal, **options)
        dtype = query.dtype
        if dtype == torch.float32:
            dtype = type_of_products(query, dtype)
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.float()
        inputs = (query.float(), key.float(), value.float(), attn_mask, dropout_p, is_causal)
        _begin()
        try:
            with torch.autocast("cpu", enabled=False):
                output = original(*inputs, **options)
        finally:
            _end()
        node: Any = output.grad_fn
        if node is not None and node.name().startswith(_FLASH):
            # The backward pass is one node of the graph, and makes the same small products.
            node.register_prehook(_begin)
            node.register_hook(_end)
        return output.to(dtype)

    attention.is_chosen_by_length = True  # type: ignore[attr-defined]
    return attention


def _has_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Optional[Tensor], is_causal: bool
) -> bool:
    """Whether :func:`attention_weights` computes these: equal types and heads, a given mask."""
    if mask is not None and (is_causal or mask.requires_grad):
        return False
    same_type = query.dtype == key.dtype == value.dtype  # autocast takes others too
    return same_type and query.shape[:-2] == key.shape[:-2]


def choose_attention(amx: bool = False) -> Callable[[], None]:
    """Let attention take the form that is fastest beside oneDNN, in this process.

    Args:
        amx: choose for an Intel processor with AMX, whose products of float32 are MKL's.

    Returns:
        A function that puts everything back as it was found.
    """
    original: Any = F.scaled_dot_product_attention
    if not torch.backends.cuda.flash_sdp_enabled() or hasattr(original, "is_chosen_by_length"):
        return lambda: None
    # TorchScript knows torch's own function by its identity, and compiles an operator for it. It
    # does not know one that somebody else has put there.
    scripted = torch.jit._builtins._get_builtin_table()
    operator = scripted.get(id(original))
    FLASH.change(amx)
    attention = F.scaled_dot_product_attention = _by_length(original, amx)
    if operator is not None:
        scripted[id(attention)] = operator

    def restore() -> None:
        F.scaled_dot_product_attention = original
        scripted.pop(id(attention), None)
        FLASH.change(True)

    return restore
