"""Linear layers, output layers and attention: as torch comes, through oneDNN, and in bfloat16.

    python -m benchmarks.bench_products [--threads 1] [--seconds 2] [--only linear|attention]
        [--bfloat16]

Each row is forward and backward of one layer. Turns alternate, and ratios to torch as it comes are
formed turn by turn. Times are those of the processor, and with several threads those on the clock,
for which the machine has to be idle. What ``--float32-products auto`` takes on this machine, and
why, is in the result: functional/float32_products.py has its rule, and this sweep the figures
behind it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, Callable, Dict, List

import torch
import torch.nn.functional as F

from benchmarks.harness import clock, positive, print_result, print_table
from spectral_fairseq.functional.cpu_attention import has_flash_kernel
from spectral_fairseq.functional.float32_products import Products, choose_products, using_products
from spectral_fairseq.functional.processor import processor

# Rows, inputs and outputs of a linear layer.
LINEAR = [
    *((4096, 128, 128), (4096, 128, 256), (4096, 512, 512), (4096, 512, 1024), (4096, 1024, 4096)),
    *((512, 512, 9_992), (512, 1024, 32_000), (64, 128, 9_712)),
]
# Sentences, heads, length and width of a head.
ATTENTION = [
    *((256, 4, 16, 32), (128, 4, 32, 128), (64, 8, 64, 64), (32, 8, 128, 64), (20, 8, 192, 64)),
    (8, 8, 512, 64),
]
AS_IT_COMES = "as torch comes"


def linear(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> Callable[[], None]:
    """Forward and backward of a linear layer."""
    x = torch.randn(rows, inputs, dtype=dtype, requires_grad=True)
    w = torch.randn(outputs, inputs, dtype=dtype, requires_grad=True)
    upstream = torch.randn(rows, outputs, dtype=dtype)
    return lambda: F.linear(x, w).backward(upstream)


def attention(
    sentences: int, heads: int, length: int, dim: int, dtype: torch.dtype
) -> Callable[[], None]:
    """Forward and backward of the attention of a sequence to itself."""
    size = (sentences, heads, length, dim)
    q, k, v = (torch.randn(size, dtype=dtype, requires_grad=True) for _ in range(3))
    upstream = torch.randn(size, dtype=dtype)
    return lambda: F.scaled_dot_product_attention(q, k, v).backward(upstream)


def timed(run: Callable[[], None]) -> float:
    """Seconds of one run, on the harness's clock."""
    started = clock()
    run()
    return clock() - started


def measure(
    make: Callable[[torch.dtype], Callable[[], None]], seconds: float, bfloat16: bool
) -> Dict[str, float]:
    """Milliseconds as torch comes, and the ratios of the other ways to that, as medians."""
    plain, fast = Products(False, ""), Products(True, "")
    single = make(torch.float32)

    def in_products(
        products: Products, run: Callable[[], None], keep_flash: bool = False, as_half: bool = False
    ) -> float:
        with using_products(products, half_precision=as_half):
            if keep_flash and has_flash_kernel():
                F.scaled_dot_product_attention = F.scaled_dot_product_attention.__wrapped__
                torch.backends.cuda.enable_flash_sdp(True)
            return timed(run)

    ways: Dict[str, Callable[[], float]] = {
        AS_IT_COMES: lambda: in_products(plain, single),
        "oneDNN": lambda: in_products(fast, single, keep_flash=True),
        "oneDNN, attention by length": lambda: in_products(fast, single),
    }
    if bfloat16:
        half = make(torch.bfloat16)
        ways["bfloat16"] = lambda: in_products(plain, half)
        ways["bfloat16, attention by length"] = lambda: in_products(plain, half, as_half=True)
    times: Dict[str, List[float]] = {name: [] for name in ways}
    ends = time.monotonic() + seconds
    while len(times[AS_IT_COMES]) < 3 or time.monotonic() < ends:
        for name, way in ways.items():
            times[name].append(way())
    first = times.pop(AS_IT_COMES)[1:]  # the first turn is a warm-up
    found = {"ms": 1e3 * statistics.median(first)}
    for name, others in times.items():
        found[name] = statistics.median(b / a for a, b in zip(first, others[1:]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--seconds", type=positive, default=2, help="a row, about")
    parser.add_argument("--only", choices=("linear", "attention"))
    parser.add_argument(
        "--bfloat16", action="store_true", help="too; takes long on a processor without it"
    )
    parser.add_argument("--quick", action="store_true", help="one tiny row of each")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kinds: Dict[str, Any] = {"linear": (linear, LINEAR), "attention": (attention, ATTENTION)}
    if args.quick:
        kinds = {"linear": (linear, [(8, 4, 4)]), "attention": (attention, [(2, 1, 4, 4)])}
    rows: List[Dict[str, Any]] = []
    for kind, (make, sizes) in kinds.items():
        for size in sizes if args.only in (None, kind) else ():
            found = measure(
                lambda dtype, make=make, size=size: make(*size, dtype), args.seconds, args.bfloat16
            )
            rows.append({"layer": kind, "size": " x ".join(map(str, size)), **found})
            print(rows[-1], flush=True)
    print_table(rows)
    chosen = choose_products()
    print_result(
        "products",
        rows=rows,
        device="cpu",
        processor=processor().name,
        flags=sorted(processor().flags & {"avx2", "avx512f", "avx512_bf16", "amx_tile", "bf16"}),
        auto=str(chosen),
    )


if __name__ == "__main__":
    main()
