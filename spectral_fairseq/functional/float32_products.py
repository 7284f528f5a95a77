"""Products of float32 matrices on a CPU: through MKL, as torch comes, or through oneDNN.

torch multiplies float32 matrices on x86 with MKL, which takes its slow paths on processors that are
not Intel's. With ``torch.backends.mkldnn.matmul.fp32_precision = "bf16"`` they go through oneDNN,
which *may* then round the factors to bfloat16, but does so on processors with AMX only. On an AMD
EPYC with AVX-512 the products are float32's, with an error of 4e-7, and take 0.33 to 0.69 of MKL's
time.

Flags: ``--float32-products`` auto.
In order: ``plugin/cpu.py: CHOSEN_PRODUCTS``, ``choose_products``, ``set_products``.

Note [Which products]
---------------------
``auto`` chooses by the processor, the version of torch and the precision of one product, and never
by a time, so that equal commands give equal bits. It takes oneDNN where all of this holds:

- the processor is AMD's and has AVX-512: on others MKL is fast (Intel), or oneDNN's way is closed
  to float32 (AVX2: torch asks for AVX-512; on a Zen 2 the setting changes nothing);
- it has no AMX, where oneDNN would round the factors;
- torch has the setting (2.9), and was compiled with MKL and oneDNN;
- the error of a product against float64 is at most twice MKL's.

Attention is an exception, with a section of its own below.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import time
from functools import cache
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spectral_fairseq.errors import check_choice

CHOICES = ("auto", "fast", "torch")


class Processor(NamedTuple):
    """What decides about the products.

    Attributes:
        vendor: as the processor names it, such as ``AuthenticAMD``; empty where it is not known.
        flags: instructions that it has, as Linux names them.
        name: for readers.
    """

    vendor: str
    flags: FrozenSet[str]
    name: str

    @property
    def has_bfloat16(self) -> bool:
        """Whether it multiplies bfloat16 numbers itself; true where that is not known."""
        return not self.flags or bool(self.flags & {"avx512_bf16", "amx_bf16", "bf16"})

    @property
    def has_amx(self) -> bool:
        """Whether it has AMX, for which oneDNN rounds float32 factors where it may."""
        return any(flag.startswith("amx_") for flag in self.flags)


@cache
def processor() -> Processor:
    """Return the processor of this machine, as Linux describes it."""
    fields: Dict[str, str] = {}
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    flags = frozenset((fields.get("flags") or fields.get("Features") or "").split())
    name = fields.get("model name") or platform.processor() or platform.machine()
    return Processor(fields.get("vendor_id", ""), flags, name)


@cache
def has_amx() -> bool:
    """Whether the processor of this machine has AMX."""
    return processor().has_amx


class Products(NamedTuple):
    """How float32 matrices are multiplied, and why.

    Attributes:
        fast: through oneDNN instead of as torch comes.
        reason: a clause for the log.
    """

    fast: bool
    reason: str

    def __str__(self) -> str:
        return f"{'oneDNN' if self.fast else 'as torch comes'}: {self.reason}"


def choose_products(choice: str = "auto") -> Products:
    """Return what ``choice`` means on this machine. See Note [Which products].

    Args:
        choice: ``auto``, ``fast`` (oneDNN wherever torch has the setting, also where it rounds
            float32 factors: the user's decision) or ``torch``.

    Raises:
        ConfigurationError: another choice.
    """
    check_choice("float32 products", choice, CHOICES)
    if choice != "auto":
        return Products(choice == "fast", f"--float32-products {choice}")
    cpu = processor()
    if not _has_setting():
        return Products(False, "this torch has no setting for oneDNN alone (2.9)")
    if cpu.has_amx:
        return Products(False, "with AMX, oneDNN would round the factors to bfloat16")
    if cpu.vendor != "AuthenticAMD" or "avx512f" not in cpu.flags:
        return Products(False, f"no gain is known on this processor ({cpu.name})")
    before, after = _error(fast=False), _error(fast=True)
    if after > 2 * before:
        return Products(False, f"oneDNN's error is {after:.1e}, and MKL's {before:.1e}")
    return Products(True, f"an AMD processor with AVX-512, where MKL is slow (error {after:.1e})")


def _has_setting() -> bool:
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    return (
        hasattr(matmul, "fp32_precision")
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
    )


@cache
def _error(fast: bool) -> float:
    """Root mean square of the relative error of a product of 256 x 256 numbers."""
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    with using_products(Products(fast, "")):
        product = left @ right
    return float((product.double() - exact).norm() / exact.norm())


def timed_products(size: int = 1024, turns: int = 5) -> Optional[Tuple[float, float]]:
    """Return GFLOP/s of a thread, in a product of two matrices, through MKL and through oneDNN.

    For information: ``auto`` does not depend on it. ``None`` where torch has no setting.
    """
    if not _has_setting():
        return None
    left, right = torch.randn(2, size, size).unbind()
    best, threads = [float("inf")] * 2, torch.get_num_threads()
    torch.set_num_threads(1)  # time of the processor, which other programs may share
    for _ in range(turns + 1):  # the first one prepares the kernels
        for fast in (False, True):
            with using_products(Products(fast, "")):
                begun = time.process_time()
                left @ right
                best[fast] = min(best[fast], time.process_time() - begun)
    torch.set_num_threads(threads)
    mkl, onednn = (2e-9 * size**3 / each for each in best)
    return mkl, onednn


def set_products(products: Products, half_precision: bool = False) -> Callable[[], None]:
    """Multiply float32 matrices in this process as ``products`` says.

    A torch without the setting (before 2.9) takes
    ``torch.set_float32_matmul_precision("medium")``, which holds for its GPUs as well. On a GPU,
    whose products this package leaves as they are, ``fast`` allows TF32.

    Args:
        products: from :func:`choose_products`.
        half_precision: whether the model is trained in bfloat16 or float16, whose products always
            go through oneDNN: attention then takes another form.

    Returns:
        A function that puts everything back as it was found.
    """
    undo: List[Callable[[], None]] = []
    matmul: Any = None
    if products.fast and _has_setting():
        matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        before = matmul.fp32_precision
        matmul.fp32_precision = "bf16"
        undo.append(lambda: setattr(matmul, "fp32_precision", before))
    elif products.fast and hasattr(torch, "get_float32_matmul_precision"):
        older = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        undo.append(lambda: torch.set_float32_matmul_precision(older))
    if products.fast and torch.cuda.is_available():
        tf32 = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        undo.append(lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", tf32))
    through_onednn = products.fast or (half_precision and _halves_lose_in_flash())
    if through_onednn and has_flash_kernel():
        # What the user has asked to go through oneDNN takes the form that was measured there.
        amx = processor().has_amx and not products.fast
        undo.append(choose_attention(matmul, amx))

    def restore() -> None:
        while undo:
            undo.pop()()

    return restore


def _halves_lose_in_flash() -> bool:
    """Whether flash attention is known to lose in half precision on this processor."""
    cpu = processor()
    if cpu.vendor == "GenuineIntel":
        return "amx_bf16" in cpu.flags
    return cpu.vendor == "AuthenticAMD" and "avx512_bf16" in cpu.flags and not cpu.has_amx


@contextlib.contextmanager
def using_products(products: Products, half_precision: bool = False) -> Iterator[None]:
    """Apply :func:`set_products` inside the block."""
    restore = set_products(products, half_precision)
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def float32_products(choice: str = "auto", half_precision: bool = False) -> Iterator[Products]:
    """Multiply float32 matrices on a CPU by the fastest way of equal precision inside the block.

        with float32_products() as products:
            print(products)
            train(model)

    Args:
        choice: see :func:`choose_products`.
        half_precision: see :func:`set_products`; also true under autocast to bfloat16.
    """
    products = choose_products(choice)
    with using_products(products, half_precision):
        yield products


# Attention on a CPU beside products that go through oneDNN.
#
# torch's flash attention for CPUs makes many small products, which lose more in oneDNN than all
# others gain, in float32 and always in bfloat16. Here attention takes the form that is fastest, by
# the length of the sequences. Forward and backward over torch's flash kernel with MKL, float32, one
# thread of an AMD EPYC (``python -m benchmarks.bench_products --only attention``):
#
#     heads x width  length  flash, oneDNN  without flash, oneDNN
#     4 x 32             24            5.7                   0.82
#     4 x 32            128            4.5                    1.9
#     8 x 64             48            5.3                   0.76
#     8 x 64             96            3.3                    1.4
#     8 x 64            256            1.7                    1.9
#
# Short sequences therefore take batched products and a softmax, and long ones the flash kernel with
# MKL's products. bfloat16 has no products in MKL: there the long ones are computed in float32.
#
# In half precision the short ones take the products of `attention_weights`. On an Intel processor
# with AMX, MKL is fast, and only half precision loses. Forward and backward of these products over
# the flash kernel in bfloat16, and over that kernel in float32 with its conversions, one thread of
# a Xeon with AMX:
#
#     heads x width  length  over bfloat16  over float32
#     4 x 32             16           0.10          0.65
#     4 x 128            32           0.45          0.59
#     8 x 64             64           0.33          0.51
#     8 x 64            128           0.37          0.52
#     8 x 64            192           0.95          0.88
#     8 x 64            256           0.99          0.81
#
# So there short sequences in half precision take them, and all others are as torch comes.

# Length from which the flash kernel with MKL is faster than batched products in oneDNN.
LONG = 64
# Length from which, with AMX, the flash kernel in half precision is faster than products.
LONG_WITH_AMX = 192
HALVES = (torch.float16, torch.bfloat16)  # types of half precision
_FLASH = "ScaledDotProductFlashAttentionForCpu"


def has_flash_kernel() -> bool:
    """Whether this process computes on a CPU, with a torch whose flash kernel can be chosen."""
    knows_compilers = hasattr(getattr(torch, "compiler", None), "is_compiling")  # torch 2.1
    return knows_compilers and not torch.cuda.is_available()


class _WithMKL:
    """Float32 products through MKL, and the flash kernel, inside the block.

    Args:
        matmul: ``torch.backends.mkldnn.matmul``; ``None`` where float32 products are MKL's anyway.
    """

    def __init__(self, matmul: Any) -> None:
        self.matmul, self.before = matmul, ""

    def __enter__(self) -> None:
        torch.backends.cuda.enable_flash_sdp(True)
        if self.matmul is not None:
            self.before, self.matmul.fp32_precision = self.matmul.fp32_precision, "ieee"

    def __exit__(self, *_: Any) -> None:
        torch.backends.cuda.enable_flash_sdp(False)
        if self.matmul is not None:
            self.matmul.fp32_precision = self.before


class _AttentionWeights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, mask: Optional[Tensor], scale: float
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
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


def _by_length(original: Callable[..., Tensor], matmul: Any, amx: bool) -> Callable[..., Tensor]:
    with_mkl = _WithMKL(matmul)
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
        half, short = query.dtype in HALVES, query.size(-2) * key.size(-2) < long**2
        as_set = torch.compiler.is_compiling()  # a compiler decides by itself
        if half and short and not as_set and _has_weights(query, key, attn_mask, is_causal):
            if is_causal:
                size = (query.size(-2), key.size(-2))
                attn_mask = torch.ones(size, dtype=torch.bool, device=query.device).tril()
            weights = attention_weights(query, key, attn_mask, options.get("scale"))
            return F.dropout(weights, dropout_p) @ value
        # The kernel knows no dropout.
        if as_set or amx or short or dropout_p or query.dtype == torch.float64:
            return original(query, key, value, attn_mask, dropout_p, is_causal, **options)
        dtype = query.dtype
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.float()
        inputs = (query.float(), key.float(), value.float(), attn_mask, dropout_p, is_causal)
        with torch.autocast("cpu", enabled=False), with_mkl:
            output = original(*inputs, **options)
        node: Any = output.grad_fn
        if matmul is not None and node is not None and node.name().startswith(_FLASH):
            # The backward pass is one node of the graph, and makes the same small products.
            node.register_prehook(lambda _: with_mkl.__enter__())
            node.register_hook(lambda *_: with_mkl.__exit__())
        return output.to(dtype)

    attention.is_chosen_by_length = True  # type: ignore[attr-defined]
    return attention


def _has_weights(query: Tensor, key: Tensor, mask: Optional[Tensor], is_causal: bool) -> bool:
    """Whether :func:`attention_weights` computes these: heads are equal and the mask is given."""
    if mask is not None and (is_causal or mask.requires_grad):
        return False
    return query.shape[:-2] == key.shape[:-2]


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
