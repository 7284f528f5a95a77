"""fused_loss_ beside transformers' loss and torch's chunked cross entropy, on a CPU.

    python -m benchmarks.bench_fused_loss [--tokens 512] [--seconds 240] [--quick]

The output layer and its loss with their gradients, from hidden states: GPT-2's and Qwen's
vocabulary, float32 and bfloat16, one thread and two. The losses take turns; a ratio is of the
processor time of one turn, and with two threads of its time on the clock, for which the machine has
to be idle. ``--seconds`` is for all rows together, each of which has two turns at least. On a
processor without bfloat16 units, which emulates its products, the rows of bfloat16 are left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, Dict, List

import torch
import torch.nn.functional as F

from benchmarks.bench_training import LOSSES, loss_of
from benchmarks.harness import PRECISIONS, clock, positive, print_result, print_table
from spectral_fairseq.functional.processor import processor

SIZES = {"GPT-2": (50_257, 768), "Qwen": (151_936, 896)}
TINY = {"GPT-2": (100, 16), "Qwen": (300, 16)}
THREADS = (1, 2)
MOST_TURNS = 9
OURS = "fused_loss_"


def kinds() -> List[str]:
    """The losses that this torch has."""
    return [kind for kind in LOSSES if "torch" not in kind or hasattr(F, "linear_cross_entropy")]


def times(words: int, width: int, tokens: int, precision: str, seconds: float) -> Dict[str, Any]:
    """Seconds of each turn by the loss; the first turn warms up and is left out."""
    losses = {
        kind: loss_of(kind, words, width, tokens, dtype=PRECISIONS[precision]) for kind in kinds()
    }
    found: Dict[str, List[float]] = {kind: [] for kind in losses}
    ends = time.monotonic() + seconds
    for turn in range(MOST_TURNS + 1):
        for kind in list(losses)[:: 1 if turn % 2 else -1]:
            begun = clock()
            losses[kind]().backward()
            if turn:
                found[kind].append(clock() - begun)
        if turn >= 2 and time.monotonic() > ends:
            break
    return found


def row(found: Dict[str, List[float]]) -> Dict[str, Any]:
    """Median seconds of each loss, and ours over the others: median, lowest and highest."""
    figures: Dict[str, Any] = {f"{kind}, s": statistics.median(one) for kind, one in found.items()}
    for kind in found.keys() - {OURS}:
        ratios = [ours / other for ours, other in zip(found[OURS], found[kind])]
        figures[f"over {kind}"] = statistics.median(ratios)
        figures[f"range over {kind}"] = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return {**figures, "turns": len(found[OURS])}


def _line(figures: Dict[str, Any]) -> str:
    rounded = {
        key: f"{value:.3g}" if isinstance(value, float) else value for key, value in figures.items()
    }
    return ", ".join(f"{key} {value}" for key, value in rounded.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=positive, default=512)
    parser.add_argument("--seconds", type=positive, default=240)
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    args = parser.parse_args()
    sizes, here = TINY if args.quick else SIZES, processor()
    precisions = ["fp32", "bf16"] if here.has_bfloat16 or args.quick else ["fp32"]
    print(f"{here.name or 'unknown processor'}, {args.tokens} tokens", flush=True)
    if len(precisions) == 1:
        print("It has no bfloat16 units: the rows of bfloat16 are left out.", flush=True)
    rows: List[Dict[str, Any]] = []
    seconds = args.seconds / (len(sizes) * len(precisions) * len(THREADS))
    for size, (words, width) in sizes.items():
        for precision in precisions:
            for threads in THREADS:
                torch.set_num_threads(threads)
                found = times(words, width, args.tokens, precision, seconds)
                given = {"vocabulary": size, "precision": precision, "threads": threads}
                rows.append({**given, **row(found)})
                print(_line(rows[-1]), flush=True)  # what has been measured stays, if it ends early
    print_table(rows)
    print_result("fused_loss", rows=rows, tokens=args.tokens, processor=here.name)


if __name__ == "__main__":
    main()
