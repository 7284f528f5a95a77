"""What control outside the optimiser adds to a training step with a plain table.

    python -m benchmarks.bench_spectrum_decay [--shape iwslt|wikitext103|xl-small|tiny ...]
                                              [--device cpu|cuda] [--pairs N]

The shapes are those of bench_step. A plain step and the control of its table take turns in one
process, A B A B; the ratio is 1 + control / (k step), pair by pair, k the default interval, and
its median is reported, with the ratio of an update that has the control in it. ``above`` changes
the directions that stand out, ``both`` all of them, and both centre the table. Memory: with and
without control, each in a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any, Dict

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
from spectral_fairseq.functional.spectrum_decay import apply_change_

SIDES = ("above", "both")


class ControlledStep(Step):
    """A step with a plain table, and the control of it as the trainer would carry it out."""

    def __init__(self, name: str, side: str, device: str) -> None:
        super().__init__(SHAPES[name], "plain", device)
        flags = {"cosreg_weight": 0.0, "spectrum_decay": 0.01, "table_centering": 0.01}
        flags["spectrum_side"] = side
        task = self.task
        self.controlling = self._build_criterion(task, {"_name": "mle_cosreg", **flags})

    @torch.no_grad()
    def control(self) -> None:
        """Change the table."""
        view = self.controlling.penalties.view(self.model)
        for one in self.controlling.table_control.controlled(view):
            apply_change_(one.parameter, one.plan(one.parameter, 1.0), one.excluded)


def measure_memory(name: str, side: str, device: str) -> float:
    """Peak MiB of three steps, each with control unless ``side`` is ``none``."""
    step = ControlledStep(name, "above" if side == "none" else side, device)
    for _ in range(3):
        step()
        if side != "none":
            step.control()
    return peak_mib(device)


def figures_of(name: str, device: str, pairs: int) -> Dict[str, Any]:
    """Times and memory of one shape, by side."""
    steps = {side: ControlledStep(name, side, device) for side in SIDES}
    alternatives = {"plain": steps["above"], **{s: steps[s].control for s in SIDES}}
    times = paired_times(alternatives, pairs)
    interval = steps["both"].controlling.table_control.interval
    module = "benchmarks.bench_spectrum_decay"
    plain_mib = in_fresh_process(module, ["--measure-memory", name, "none", "--device", device])
    found = {}
    for side in SIDES:
        shares = [control / step for control, step in zip(times[side], times["plain"])]
        mib = in_fresh_process(module, ["--measure-memory", name, side, "--device", device])
        found[side] = {
            "plain_s": statistics.median(times["plain"]),
            "control_s": statistics.median(times[side]),
            "due_ratio": 1 + statistics.median(shares),
            "time_ratio": 1 + statistics.median(shares) / interval,
            "time_ratio_max": 1 + max(shares) / interval,
            "memory_ratio": mib / plain_mib,
            "plain_mib": plain_mib,
            "interval": interval,
            "pairs": pairs,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["iwslt"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=positive, default=5)
    parser.add_argument("--measure-memory", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure_memory:
        print(measure_memory(*args.measure_memory, args.device))
        return
    results = {}
    for name in args.shape:
        print(f"{name}: {SHAPES[name]['what']}, {args.device}", flush=True)
        results[name] = figures_of(name, args.device, args.pairs)
        print_table([{"side": side, **row} for side, row in results[name].items()])
    print_result("spectrum_decay", device=args.device, results=results)


if __name__ == "__main__":
    main()
