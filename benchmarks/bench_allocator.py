"""A training step on the CPU while glibc keeps freed memory, and while it hands it back.

Usage: python -m benchmarks.bench_allocator [--pairs 4] [--steps 20] [--shape quickstart]

glibc reads the setting when a process starts, so each run is a process of its own; they take turns.
The step is that of plain fairseq, at the sizes of the quickstart. It clears new memory for every
tensor of more than 32 MiB, such as the scores of all words for a batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any, Dict, List
from unittest import mock

from benchmarks.bench_step import SHAPES, Step
from benchmarks.harness import (
    KEEP_FREED_MEMORY,
    in_fresh_process,
    median_ratio,
    peak_resident_mib,
    positive,
    print_result,
    print_table,
)

_IWSLT = SHAPES["iwslt"]
_QUICKSTART = {"embed_dim": 128, "ffn_embed_dim": 256, "layers": 2}
SIZES: Dict[str, Dict[str, Any]] = {
    "quickstart": {
        **_IWSLT,
        "what": "a Transformer with d = 128 and 2+2 layers, N = 5,913, 1,600 tokens a step",
        "words": 5_913,
        "sentences": 50,
        "model": {
            **_IWSLT["model"],
            **{f"{s}_{k}": v for s in ("encoder", "decoder") for k, v in _QUICKSTART.items()},
        },
    },
    "tiny": SHAPES["tiny"],
}


def measure(shape: str, steps: int) -> Dict[str, float]:
    """Seconds and processor seconds of a step, and peak MiB of this process."""
    step = Step(SIZES[shape], "plain", "cpu", "fp32")
    step()
    begin, begin_processor = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    return {
        "seconds": (time.perf_counter() - begin) / steps,
        "processor_seconds": (time.process_time() - begin_processor) / steps,
        "mib": peak_resident_mib(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SIZES), default="quickstart")
    parser.add_argument("--steps", type=positive, default=20, help="a run, after a first one")
    parser.add_argument("--pairs", type=positive, default=4)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.shape, args.steps)))
        return
    print(f"{args.shape}: {SIZES[args.shape]['what']}", flush=True)
    sizes = ["--shape", args.shape, "--steps", str(args.steps)]
    environments: Dict[str, Dict[str, str]] = {"as glibc does": {}, "kept": KEEP_FREED_MEMORY}
    runs: Dict[str, List[Dict[str, float]]] = {name: [] for name in environments}
    for _ in range(args.pairs):
        for name, environment in environments.items():
            with mock.patch.dict(os.environ, environment):
                found = in_fresh_process("benchmarks.bench_allocator", [*sizes, "--measure"])
            runs[name].append(found)
    rows = [
        {
            "freed memory": name,
            **{key: statistics.median(run[key] for run in found) for key in found[0]},
            **{
                f"{key}_ratio": median_ratio(
                    [run[key] for run in found], [run[key] for run in runs["as glibc does"]]
                )
                for key in found[0]
            },
        }
        for name, found in runs.items()
    ]
    print_table(rows)
    print_result(
        "allocator",
        **{key: vars(args)[key] for key in ("shape", "steps")},
        environment=KEEP_FREED_MEMORY,
        results=rows,
    )


if __name__ == "__main__":
    main()
