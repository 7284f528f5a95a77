"""A training step with each penalty on a plain table against the same step without.

    python -m benchmarks.bench_penalties [--shape iwslt|wikitext103|tiny ...] [--repetitions N]

Two figures for each penalty. ``ratio``: one model takes steps without and with it in turn, A B A
B, and the median of the ratios is reported. ``share``: the penalty alone, forward, backward and
the addition to the table's gradient, over the plain step; it resolves a hundredth where the
ratio's noise does not.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any, Callable, Dict, List, Optional

import torch
from torch import Tensor

from benchmarks.bench_step import SHAPES, Step
from benchmarks.harness import (
    add_device_options,
    median_ratio,
    paired_times,
    positive,
    print_result,
    print_table,
)
from spectral_fairseq.functional.cosine_penalty import cosine_penalty
from spectral_fairseq.functional.d_optimal_penalty import d_optimal_penalty
from spectral_fairseq.functional.row_norms import row_norms
from spectral_fairseq.functional.spectra import singular_values
from spectral_fairseq.functional.spectral_normalization_penalty import (
    spectral_normalization_penalty,
)
from spectral_fairseq.functional.weight_norm_penalty import weight_norm_penalty

# Of a table and the rows that are excluded, on its device.
Penalty = Callable[[Tensor, Tensor], Tensor]
PENALTIES: Dict[str, Penalty] = {
    "cosine": cosine_penalty,
    "weight norm": lambda w, excluded: 1e-3 * weight_norm_penalty(row_norms(w), 2.0, excluded),
    "spectral normalisation": lambda w, excluded: spectral_normalization_penalty(
        singular_values(w, excluded)
    ),
    "D-optimal": lambda w, excluded: 1e-3 * d_optimal_penalty(singular_values(w, excluded)),
}
BUDGETS = {"cosine": 1.01, "weight norm": 1.01}


class PenalisedStep(Step):
    """A plain model's step, with what is asked for at the call added to it."""

    def __init__(self, shape: Dict[str, Any], device: str, precision: str) -> None:
        super().__init__(shape, "plain", device, precision)
        self.table = self.model.decoder.output_projection.weight
        self.excluded = torch.tensor([1], device=device)

    def run(self, penalty: Optional[Penalty] = None) -> None:
        """Take one step, with a penalty if one is given."""
        self.optimiser.zero_grad()
        net_output = self.model(**self.sample["net_input"])
        loss, _ = self.criterion.compute_loss(self.model, net_output, self.sample)
        loss = loss / self.sample["ntokens"]
        if penalty is not None:
            loss = loss + penalty(self.table.float(), self.excluded)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()

    def alone(self, penalty: Penalty) -> None:
        """The penalty's gradient, added to the one that the last step left."""
        penalty(self.table.float(), self.excluded).backward()


def measure(name: str, repetitions: int, device: str, precision: str) -> List[Dict[str, Any]]:
    step = PenalisedStep(SHAPES[name], device, precision)
    runs: Dict[str, Callable[[], None]] = {"plain": step.run}
    for label, penalty in PENALTIES.items():
        runs[label] = lambda penalty=penalty: step.run(penalty)
    times = paired_times(runs, repetitions)
    alone = paired_times(
        {label: lambda p=p: step.alone(p) for label, p in PENALTIES.items()}, repetitions
    )
    plain = statistics.median(times["plain"])
    return [
        {
            "shape": name,
            "penalty": label,
            "seconds": statistics.median(times[label]),
            "ratio": median_ratio(times[label], times["plain"]),
            "share": statistics.median(alone[label]) / plain if label in alone else None,
            "budget": BUDGETS.get(label),
        }
        for label in times
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["iwslt"])
    parser.add_argument("--repetitions", type=positive, default=5)
    add_device_options(parser)
    args = parser.parse_args()
    rows = []
    for name in args.shape:
        print(f"{name}: {SHAPES[name]['what']}", flush=True)
        rows.extend(measure(name, args.repetitions, args.device, args.precision))
    print_table(rows)
    print_result("penalties", repetitions=args.repetitions, precision=args.precision, rows=rows)


if __name__ == "__main__":
    main()
