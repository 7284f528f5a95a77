"""What the benchmarks share: paired timing, peak memory in fresh processes, one form of report."""

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

import spectral_fairseq

# Importing fairseq sets the root logger to DEBUG, and with it every other library's.
logging.getLogger().setLevel(logging.WARNING)


def positive(text: str) -> int:
    """A number on the command line of which zero or fewer would only show after the work."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1; found {number}")
    return number


def paired_times(
    alternatives: Dict[str, Callable[[], None]], repetitions: int
) -> Dict[str, List[float]]:
    """Seconds of each alternative, taken in turn, A B A B, after one untimed round.

    Whatever else the machine does then falls on all of them alike; form ratios turn by turn.
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
    """Highest resident set that this process has had, in MiB."""
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage's figure outlives exec: a child would start from its parent's peak.
        return int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def extra_memory_mib(run: Callable[[], None]) -> float:
    """MiB by which ``run`` raises this process's peak; call it once, in a fresh process."""
    before = peak_resident_mib()
    run()
    return peak_resident_mib() - before


def in_fresh_process(module: str, arguments: Sequence[str]) -> float:
    """Run ``python -m module`` with ``arguments``; the number that it prints last."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    return float(done.stdout.split()[-1])


def print_table(rows: Sequence[Dict[str, Any]]) -> None:
    """Print dictionaries of equal keys as aligned columns."""
    cells = [list(rows[0])] + [
        [f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)))


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
