"""A step with R-Drop against plain fairseq: time and peak memory.

Usage: python -m benchmarks.bench_consistency [--pairs 5] [--shape iwslt] [--sentences 128]

The models and batches are those of bench_step.py, the optimiser is fairseq's Adam. Time: the steps
run alternately in one process. Memory: each variant in a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any, Dict

from fairseq.optim.adam import Adam

from benchmarks.bench_step import SHAPES, Step
from benchmarks.harness import (
    add_device_options,
    device_arguments,
    in_fresh_process,
    median_ratio,
    paired_times,
    peak_mib,
    positive,
    print_result,
    print_table,
)

BUDGET = {"time": 2.05, "memory": 1.3}
PLAIN: Dict[str, Any] = {"_name": "label_smoothed_cross_entropy", "label_smoothing": 0.1}
OURS: Dict[str, Any] = {"_name": "regularized_cross_entropy", "label_smoothing": 0.1}
BETAS = (0.9, 0.98)


# name -> the flags of the criterion
VARIANTS: Dict[str, Dict[str, Any]] = {
    "plain": PLAIN,
    "r_drop": {**OURS, "rdrop_weight": 5.0},
}


def step_of(args: argparse.Namespace, sentences: int, variant: str) -> Step:
    """A step of plain fairseq's model with what a variant changes."""
    criterion = VARIANTS[variant]
    shape = {**SHAPES[args.shape], "sentences": sentences}
    arch, model = shape["archs"][0], shape["model"]
    shape = {**shape, "archs": (arch, arch), "model": model, "criterions": (criterion, criterion)}
    step = Step(shape, "plain", args.device, args.precision)
    step.optimiser = Adam(list(step.model.parameters()), lr=1e-4, betas=BETAS)
    return step


def measure_memory(args: argparse.Namespace, sentences: int) -> float:
    """Peak MiB of two steps; to be called in a process of its own."""
    step = step_of(args, sentences, args.measure_memory)
    for _ in range(2):
        step()
    return peak_mib(args.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=("iwslt", "tiny"), default="iwslt")
    parser.add_argument("--sentences", type=positive, help="a step; those of the shape if unset")
    parser.add_argument("--pairs", type=positive, default=5)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    add_device_options(parser)
    parser.add_argument("--measure-memory", choices=list(VARIANTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    sentences = args.sentences or SHAPES[args.shape]["sentences"]
    if args.measure_memory:
        print(measure_memory(args, sentences))
        return
    what = SHAPES[args.shape]["what"]
    print(f"{args.shape}: {what}; here {sentences} sentences a step", flush=True)
    variants = list(dict.fromkeys(["plain", *args.variants]))
    steps = {name: step_of(args, sentences, name) for name in variants}
    times = paired_times(steps, args.pairs)
    module = "benchmarks.bench_consistency"
    shape = ["--shape", args.shape, "--sentences", str(sentences), *device_arguments(args)]
    rows = [
        {
            "variant": name,
            "seconds": statistics.median(times[name]),
            "time_ratio": median_ratio(times[name], times["plain"]),
            "mib": in_fresh_process(module, [*shape, "--measure-memory", name]),
        }
        for name in variants
    ]
    for row in rows:
        row["memory_ratio"] = row["mib"] / rows[0]["mib"]
    print_table(rows)
    figures = {
        "sentences": sentences,
        "precision": args.precision,
        "pairs": args.pairs,
        "budget": BUDGET,
        "results": rows,
    }
    print_result("consistency", shape=args.shape, **figures)


if __name__ == "__main__":
    main()
