"""Time and memory of measuring a large table, as ``spectral-fairseq analyze`` does.

    python -m benchmarks.bench_analysis [--rows 267735] [--dim 1024] [--threads 2] [--kind plain]

A synthetic checkpoint is written to a temporary folder (a cone: a Gaussian table with a common
direction), then hashed, read and measured in a fresh process: all words for I1 and I2 by three
conventions, singular values, cosines, fits, norms. Budget at the default size: 60 s and 4 GiB on
two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict

import torch

from benchmarks.harness import peak_resident_mib, print_result, print_table
from spectral_fairseq.analysis.measures import Options
from spectral_fairseq.analysis.results import analyse_checkpoint

BUDGET = {"seconds": 60.0, "mib": 4096.0}


def write_checkpoint(path: Path, rows: int, dim: int, kind: str) -> None:
    torch.manual_seed(1)
    table = torch.randn(rows, dim).div_(dim**0.5).add_(0.5 / dim**0.5)
    name = "decoder.embed_tokens"
    if kind == "svd":
        model = {
            f"{name}.U": table, f"{name}.sigma": torch.ones(dim),
            f"{name}.V": 16 * torch.eye(dim), f"{name}.scale": torch.tensor(rows**0.5 / dim**0.5),
            f"{name}.initial_norm": torch.tensor(rows**0.5),
        }  # fmt: skip
    else:
        model = {f"{name}.weight": table}
    torch.save({"args": None, "cfg": None, "model": model}, path)


def measure(path: str, threads: int, words: int) -> None:
    torch.set_num_threads(threads)
    started = time.perf_counter()
    last, name, steps = started, "", {}

    def step(begun: str) -> None:
        nonlocal last, name
        now = time.perf_counter()
        if name:
            steps[name] = round(now - last, 2)
        last, name = now, begun

    analyse_checkpoint(path, Options(isotropy_words=words), step=step)
    step("end")
    seconds = time.perf_counter() - started
    figures = {"seconds": seconds, "cpu_seconds": time.process_time(), "mib": peak_resident_mib()}
    print(json.dumps({**figures, "steps": steps}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=267_735)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kind", choices=("plain", "svd"), default="plain")
    parser.add_argument("--isotropy-words", type=int, default=0)
    parser.add_argument("--measure", metavar="CKPT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.threads, args.isotropy_words)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        write_checkpoint(path, args.rows, args.dim, args.kind)
        options = ["--measure", str(path), "--threads", str(args.threads),
                   "--isotropy-words", str(args.isotropy_words)]  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.bench_analysis", *options],
            check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        found: Dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print_table([{"step": name, "seconds": seconds} for name, seconds in found["steps"].items()])
    sizes = {"rows": args.rows, "dim": args.dim, "kind": args.kind, "torch_threads": args.threads,
             "isotropy_words": args.isotropy_words}  # fmt: skip
    print_result("analysis", **sizes, **found, budget=BUDGET)


if __name__ == "__main__":
    main()
