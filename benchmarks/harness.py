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


def positive(text: str) -> int:
    """Parse a number of the command line, and refuse zero and fewer before any work is done."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1; found {number}")
    return number


def paired_times(
    alternatives: Dict[str, Callable[[], None]], repetitions: int
) -> Dict[str, List[float]]:
    """Seconds of each alternative, run in turn (A B A B) after one untimed round.

    Other work of the machine then slows all of them alike. Form ratios turn by turn.
    """
    times: Dict[str, List[float]] = {name: [] for name in alternatives}
    for turn in range(repetitions + 1):
        for name, run in alternatives.items():
            started = time.perf_counter()
            run()
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
        return int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def extra_memory_mib(run: Callable[[], None]) -> float:
    """MiB by which ``run`` raises this process's peak. Call it once, in a fresh process."""
    before = peak_resident_mib()
    run()
    return peak_resident_mib() - before


def in_fresh_process(module: str, arguments: Sequence[str]) -> Any:
    """Run ``python -m module`` with ``arguments``; returns the JSON value that it prints last."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def print_table(rows: Sequence[Dict[str, Any]]) -> None:
    """Print dictionaries of equal keys as a table, with four digits of each number."""
    print(tabulate(rows, headers="keys", floatfmt=".4g"))


def print_result(benchmark: str, **figures: Any) -> None:
    """Print the figures with the versions they were measured on, as one JSON object on one line."""
    versions = {
        "spectral_fairseq": spectral_fairseq.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps({"benchmark": benchmark, **figures, "versions": versions}))
