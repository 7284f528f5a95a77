"""What control outside the optimiser adds to a training step.

    python -m benchmarks.bench_spectrum_decay [--shape iwslt|wikitext103|xl-small|tiny ...]
                                              [--device cpu|cuda] [--pairs N]

The shapes are those of bench_step. A step and the change of its table take turns in one process,
A B A B; the ratio is 1 + change / (k step), pair by pair, with a k of 10, and its median is
reported, with the ratio of an update that has the change in it. With a plain table ``above``
changes the directions that stand out, ``both`` all of them, and both centre the table; ``renewed``
makes the factors of an SVD table its decomposition, and carries Adam's moments over. Memory: with
and without the change, each in a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
from types import SimpleNamespace
from typing import Any, Callable, Dict

import torch

from benchmarks.bench_step import SHAPES, Step
from benchmarks.harness import (
    in_fresh_process,
    paired_times,
    peak_mib,
    positive,
    print_result,
    print_table,
)
from spectral_fairseq.functional.table_control import apply_change_
from spectral_fairseq.plugin.factor_renewal import renew_factors
from spectral_fairseq.plugin.find import find_svd_tables

INTERVAL = 10  # the default of --spectrum-decay, and what studies/spectrum has for --svd-interval


class ControlledStep(Step):
    """A step with a plain table, and the control of it as the trainer would carry it out."""

    def __init__(self, name: str, side: str, device: str) -> None:
        super().__init__(SHAPES[name], "plain", device)
        flags = {"cosreg_weight": 0.0, "spectrum_decay": 0.01, "table_centering": 0.01}
        flags["spectrum_side"] = side
        task = self.task
        self.controlling = self._build_criterion(task, {"_name": "mle_cosreg", **flags})

    @torch.no_grad()
    def change(self) -> None:
        """Change the table."""
        control = self.controlling.objective_of(self.model).control
        table = control.table
        assert table is not None
        apply_change_(table, control.plan(table, 1.0), control.excluded(table))


class RenewedStep(Step):
    """A step with an SVD table, and the renewal of its factors."""

    def __init__(self, name: str, device: str) -> None:
        super().__init__(SHAPES[name], "spectrum", device)

    def change(self) -> None:
        """Renew the factors."""
        for table in find_svd_tables(self.model):
            optimizer = SimpleNamespace(optimizer=self.optimiser)
            renew_factors(table, optimizer)


WAYS: Dict[str, Callable[[str, str], Any]] = {
    "above": lambda name, device: ControlledStep(name, "above", device),
    "both": lambda name, device: ControlledStep(name, "both", device),
    "renewed": RenewedStep,
}


def measure_memory(name: str, way: str, changed: bool, device: str) -> float:
    """Peak MiB of three steps, each with the change or none."""
    step = WAYS[way](name, device)
    for _ in range(3):
        step()
        if changed:
            step.change()
    return peak_mib(device)


def figures_of(name: str, device: str, pairs: int) -> Dict[str, Any]:
    """Times and memory of one shape, by what is done to the table."""
    module = "benchmarks.bench_spectrum_decay"
    found = {}
    for way, build in WAYS.items():
        step = build(name, device)
        times = paired_times({"step": step, "change": step.change}, pairs)
        shares = [change / step for change, step in zip(times["change"], times["step"])]
        plain, changed = (
            in_fresh_process(module, ["--measure-memory", name, way, which, "--device", device])
            for which in ("without", "with")
        )
        found[way] = {
            "step_s": statistics.median(times["step"]),
            "change_s": statistics.median(times["change"]),
            "due_ratio": 1 + statistics.median(shares),
            "time_ratio": 1 + statistics.median(shares) / INTERVAL,
            "time_ratio_max": 1 + max(shares) / INTERVAL,
            "memory_ratio": changed / plain,
            "mib_without": plain,
            "interval": INTERVAL,
            "pairs": pairs,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["iwslt"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=positive, default=5)
    parser.add_argument("--measure-memory", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure_memory:
        name, way, which = args.measure_memory
        print(measure_memory(name, way, which == "with", args.device))
        return
    results = {}
    for name in args.shape:
        print(f"{name}: {SHAPES[name]['what']}, {args.device}", flush=True)
        results[name] = figures_of(name, args.device, args.pairs)
        print_table([{"change": way, **row} for way, row in results[name].items()])
    print_result("spectrum_decay", device=args.device, results=results)


if __name__ == "__main__":
    main()
