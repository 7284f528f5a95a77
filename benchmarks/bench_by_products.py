"""What weights and measures of tokens cost beside the blockwise loss alone.

Usage: python -m benchmarks.bench_by_products [--threads 1] [--precision fp32] [--turns 5]
    [--frozen] [--quick]

Forward and backward of the loss of GPT-2's and Qwen's vocabularies. The forms take turns; a ratio
is of the processor time of one turn to that of the loss alone in the same round, and with several
threads of its time on the clock, for which the machine has to be idle. Each peak is of a fresh
process. Log-probabilities with a gradient for the table compute the scores a second time, which is
a fourth product; with --frozen, as under LoRA, all forms have two.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any, Callable, Dict, List

import torch
from torch import Tensor

from benchmarks.harness import (
    PRECISIONS,
    clock,
    extra_memory_mib,
    in_fresh_process,
    positive,
    print_result,
    print_table,
)
from spectral_fairseq.functional.log_probs import blockwise_log_probs
from spectral_fairseq.functional.softmax_loss import (
    blockwise_cross_entropy,
    measured_cross_entropy,
)

# Words, dimensions and tokens.
SIZES = {"GPT-2": (50_257, 768, 512), "Qwen": (151_936, 896, 256)}

FORMS: Dict[str, Callable[..., Tensor]] = {
    "alone": lambda *given: blockwise_cross_entropy(*given).loss,
    "weights": lambda *given: blockwise_cross_entropy(*given, weights=_weights(given[1])).loss,
    "by probability": lambda *given: blockwise_cross_entropy(*given, by_probability=True).loss,
    "measures": lambda *given: measured_cross_entropy(*given)[0].loss,
    "log-probabilities": lambda *given: -blockwise_log_probs(*given).log_probs.sum(),
}


def _weights(targets: Tensor) -> Tensor:
    return torch.linspace(0, 2, len(targets))


def made(size: str, dtype: torch.dtype, frozen: bool) -> List[Tensor]:
    """Features, targets and table of a size; a frozen table has no gradient."""
    words, dim, tokens = SIZES[size]
    torch.manual_seed(0)
    features = torch.randn(tokens, dim, dtype=dtype).requires_grad_()
    table = (torch.randn(words, dim) * dim**-0.5).to(dtype).requires_grad_(not frozen)
    return [features, torch.randint(words, (tokens,)), table]


def seconds(form: str, inputs: List[Tensor]) -> float:
    """Of a forward and a backward pass."""
    inputs[0].grad = inputs[2].grad = None
    begun = clock()
    FORMS[form](*inputs).backward()
    return clock() - begun


def ratios(inputs: List[Tensor], turns: int) -> Dict[str, List[float]]:
    """Of each form, one for each round behind the first, which warms up."""
    found: Dict[str, List[float]] = {form: [] for form in FORMS}
    for turn in range(turns + 1):
        order = list(FORMS) if turn % 2 else list(FORMS)[::-1]
        times = {form: seconds(form, inputs) for form in order}
        for form in FORMS if turn else ():
            found[form].append(times[form] / times["alone"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--turns", type=positive, default=5)
    parser.add_argument("--frozen", action="store_true", help="a table without a gradient")
    parser.add_argument("--quick", action="store_true", help="one tiny size")
    parser.add_argument("--peak", nargs=2, metavar=("SIZE", "FORM"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = PRECISIONS[args.precision]
    if args.quick:
        SIZES.update({"GPT-2": (100, 16, 32), "Qwen": (300, 16, 32)})
    if args.peak:
        size, form = args.peak
        inputs = made(size, dtype, args.frozen)
        print(extra_memory_mib(lambda: FORMS[form](*inputs).backward()))
        return
    common = ["--threads", str(args.threads), "--precision", args.precision]
    common += [f"--{flag}" for flag in ("frozen", "quick") if getattr(args, flag)]
    rows: List[Dict[str, Any]] = []
    for size in SIZES:
        for form, found in ratios(made(size, dtype, args.frozen), args.turns).items():
            peak = in_fresh_process("benchmarks.bench_by_products", [*common, "--peak", size, form])
            row = {"size": size, "form": form, "time": statistics.median(found)}
            rows.append({**row, "lowest": min(found), "highest": max(found), "MiB": peak})
    print_table(rows)
    print_result(
        "by_products", rows=rows, frozen=args.frozen, threads=args.threads, precision=args.precision
    )


if __name__ == "__main__":
    main()
