"""Every model, criterion and precision on the device, against float32 on the CPU."""

from __future__ import annotations

import argparse
from typing import Any, Dict

import torch

from benchmarks.gpu.report import Report
from tests.cuda.matrix import cases
from tests.cuda.parity import BOUNDS, compare

TINY = (("transformer_sc svd mos", "spectrum control", "fp32"),)


def run(args: argparse.Namespace, report: Report) -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    for case in TINY if args.tiny else cases():
        model, criterion, precision = case

        def measure(case: Any = case) -> Dict[str, Any]:
            found = compare(*case, args.device)
            bound = BOUNDS[case[2]]
            return {**found._asdict(), "ok": found.loss <= bound and found.gradient <= 2 * bound}

        if not report.add(measure, model=model, criterion=criterion, precision=precision):
            return
