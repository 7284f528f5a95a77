"""Paired timing, peak memory in fresh processes and the form of report of all benchmarks."""

from __future__ import annotations

import argparse
import json
import logging
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import torch
from tabulate import tabulate

import spectral_fairseq

# Importing fairseq sets the root logger to DEBUG, and thereby the loggers of all libraries.
logging.getLogger().setLevel(logging.WARNING)

# By default glibc hands the memory of every large tensor back when it is freed. Clearing the pages
# of the next one takes a fifth of a small training's time (bench_allocator.py).
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**34), "MALLOC_TRIM_THRESHOLD_": str(2**34)}


def positive(text: str) -> int:
    """Parse a number of the command line, and refuse zero and fewer before any work is done."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1; found {number}")
    return number


PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--device`` and ``--precision``, the dtype of parameters and activations."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--precision", choices=list(PRECISIONS), default="fp32")


def device_arguments(args: argparse.Namespace) -> List[str]:
    """The same options for a fresh process."""
    return ["--device", args.device, "--precision", args.precision]


def synchronise() -> None:
    """Wait until a GPU has done what it was told, if this process uses one."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def paired_times(
    alternatives: Dict[str, Callable[[], None]], repetitions: int
) -> Dict[str, List[float]]:
    """Seconds of each alternative, run in turn (A B A B) after one untimed round.

    Other work of the machine then slows all of them alike. Form ratios turn by turn. Each time
    ends when the GPU has done its work.
    """
    times: Dict[str, List[float]] = {name: [] for name in alternatives}
    for turn in range(repetitions + 1):
        for name, run in alternatives.items():
            synchronise()
            started = time.perf_counter()
            run()
            synchronise()
            if turn:
                times[name].append(time.perf_counter() - started)
    return times


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median over the turns of numerator / denominator."""
    return statistics.median(a / b for a, b in zip(numerator, denominator))


def peak_resident_mib() -> float:
    """Highest resident memory of this process so far, in MiB."""
    status = Path("/proc/self/status")
    if status.exists():
        # The figure of getrusage survives exec: a child would start from its parent's peak.
        (kilobytes,) = re.findall(r"VmHWM:\s*(\d+) kB", status.read_text())
        return int(kilobytes) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def peak_mib(device: str) -> float:
    """Highest memory of this process so far: resident on a CPU, allocated on a GPU."""
    return torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else peak_resident_mib()


def extra_memory_mib(run: Callable[[], None], device: str = "cpu") -> float:
    """MiB by which ``run`` raises this process's peak. Call it once, in a fresh process."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
    else:
        before = peak_resident_mib()
    run()
    return peak_mib(device) - before


def in_fresh_process(module: str, arguments: Sequence[str]) -> Any:
    """Run ``python -m module`` with ``arguments``; returns the JSON value that it prints last."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def print_table(rows: Sequence[Dict[str, Any]]) -> None:
    """Print dictionaries of equal keys as a table, with four digits of each number."""
    print(tabulate(rows, headers="keys", floatfmt=".4g"))


def gpu() -> Dict[str, Any]:
    """Which GPU there is, its memory, CUDA, and whether float32 products may use TF32."""
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory_mib": properties.total_memory / 2**20,
        "cuda": torch.version.cuda,
        "float32_products": torch.get_float32_matmul_precision(),
    }


def clock() -> float:
    """Seconds of the processor with one thread; with several, which wait busily, of the clock."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def whole_records(path: Path) -> List[Dict[str, Any]]:
    """The JSON object of each line; a last one that was cut off is left out, as is no file."""
    lines = path.read_text("utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def commit() -> str:
    """The commit of this clone, with ``-dirty`` if files have been changed; empty outside one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = subprocess.run(
        [*command, "--exclude=*"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    return found.stdout.strip()


def versions() -> Dict[str, Any]:
    """What figures are measured on."""
    return {
        "spectral_fairseq": spectral_fairseq.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        **gpu(),
    }


def print_result(benchmark: str, **figures: Any) -> None:
    """Print the figures with the versions they were measured on, as one JSON object on one line."""
    print(json.dumps({"benchmark": benchmark, **figures, "versions": versions()}))
