"""Products of float32 matrices on a CPU: through MKL, as torch comes, or through oneDNN.

torch multiplies float32 matrices on x86 with MKL, which takes its slow paths on processors that are
not Intel's. With ``torch.backends.mkldnn.matmul.fp32_precision = "bf16"`` they go through oneDNN,
which *may* then round the factors to bfloat16, but does so on processors with AMX only. On an AMD
EPYC with AVX-512 the products are float32's, with an error of 4e-7, and take 0.33 to 0.69 of MKL's
time.

Flags: ``--float32-products`` auto.
In order: ``plugin/products.py: CHOSEN_PRODUCTS``, ``choose_products``, ``set_products``.

Note [Which products]
---------------------
``auto`` chooses by the processor, the version of torch and the precision of one product, and never
by a time, so that equal commands give equal bits. It takes oneDNN where all of this holds:

- the processor is AMD's and has AVX-512: on others MKL is fast (Intel), or oneDNN's way is closed
  to float32 (AVX2: torch asks for AVX-512; on a Zen 2 the setting changes nothing);
- it has no AMX, where oneDNN would round the factors;
- torch has the setting (2.9), and was compiled with MKL and oneDNN;
- the error of a product against float64 is at most twice MKL's.

Attention is an exception: ``cpu_attention.py``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from functools import cache, partial
from typing import Callable, Dict, Iterator, NamedTuple, Optional, Tuple

import torch

from spectral_fairseq.errors import check_choice
from spectral_fairseq.functional.cpu_attention import choose_attention, has_flash_kernel
from spectral_fairseq.functional.processor import processor
from spectral_fairseq.functional.settings import CUDA, FLOAT32, ONEDNN, has_onednn_setting

CHOICES = ("auto", "fast", "torch")


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
    return (
        has_onednn_setting()
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
    )


@cache
def _error(fast: bool) -> float:
    """Root mean square of the relative error of a product of 256 x 256 float32 numbers."""
    generator = torch.Generator().manual_seed(1)
    left, right = torch.randn(
        2, 256, 256, generator=generator, dtype=torch.float32, device="cpu"
    ).unbind()
    exact = left.double() @ right.double()
    with using_products(Products(fast, "")), torch.autocast("cpu", enabled=False):
        product = left @ right
    return float((product.double() - exact).norm() / exact.norm())


def timed_products(size: int = 1024, turns: int = 5) -> Optional[Tuple[float, float]]:
    """Return GFLOP/s of a thread, in a product of two matrices, through MKL and through oneDNN.

    For information: ``auto`` does not depend on it. ``None`` where torch has no setting.
    """
    if not _has_setting():
        return None
    left, right = torch.randn(2, size, size, dtype=torch.float32, device="cpu").unbind()
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
        A function that puts everything back as it was found. Where others in this process have
        asked for the same part of it, in other threads, the last one does.
    """
    parts: Dict[str, Callable[[], Callable[[], None]]] = {}
    if products.fast:
        parts["products"] = _multiply_fast
    through_onednn = products.fast or (half_precision and _halves_lose_in_flash())
    if through_onednn and has_flash_kernel():
        # What the user has asked to go through oneDNN takes the form that was measured there.
        amx = processor().has_amx and not products.fast
        parts["attention"] = partial(choose_attention, amx)
    with contextlib.ExitStack() as taken:
        for name, apply in parts.items():
            with _lock:
                if name not in _in_force:
                    _in_force[name] = _Part(name, apply())
                part = _in_force[name]
                part.users += 1
            taken.callback(_leave, part)
        kept = taken.pop_all()
    return kept.close


class _Part:
    """A part of a choice that is in force, how many have asked for it, and what undoes it."""

    def __init__(self, name: str, undo: Callable[[], None]) -> None:
        self.name, self.users, self.undo = name, 0, undo


_lock = threading.Lock()
_in_force: Dict[str, _Part] = {}


def _leave(part: _Part) -> None:
    with _lock:
        part.users -= 1
        if part.users:
            return
        if _in_force.get(part.name) is part:
            del _in_force[part.name]
        part.undo()


def _multiply_fast() -> Callable[[], None]:
    """Let torch multiply by its fastest way, and return what undoes it."""
    if not _has_setting():
        return partial(FLOAT32.change, FLOAT32.change("medium"))
    with contextlib.ExitStack() as undo:
        undo.callback(ONEDNN.change, ONEDNN.change("bf16"))
        if torch.cuda.is_available():
            undo.callback(CUDA.change, CUDA.change("tf32"))
        return undo.pop_all().close


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
