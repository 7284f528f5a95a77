"""fairseq-train as a user runs it: every method with the first seed, then with the next."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List

import spectral_fairseq
from benchmarks.gpu.report import Report

METHODS = {
    "plain": "--arch transformer --criterion label_smoothed_cross_entropy",
    "spectrum control": "--arch transformer_sc --criterion spectrum_control",
    "mos": "--arch transformer_mos --mixture-context-scale 4 --criterion mle_cosreg "
    "--cosreg-weight 0",
    "r-drop": "--arch transformer --criterion regularized_cross_entropy --rdrop-weight 5",
}
SEEDS = (1, 2, 3)
RECIPE = (
    "--task translation --share-all-embeddings --label-smoothing 0.1 --dropout 0.3 "
    "--weight-decay 0.0001 --optimizer adam --lr 5e-4 --lr-scheduler inverse_sqrt "
    "--warmup-updates 4000 --clip-norm 0 --max-tokens 4096 --no-save --num-workers 2 "
    "--log-format json --log-interval 50"
)


def _sizes(width: int, layers: int) -> List[str]:
    sides = []
    for side in ("encoder", "decoder"):
        sides += [f"--{side}-embed-dim", width, f"--{side}-ffn-embed-dim", 2 * width]
        sides += [f"--{side}-attention-heads", 4, f"--{side}-layers", layers]
    return [str(one) for one in sides]


def command(args: argparse.Namespace, method: str, seed: int) -> List[str]:
    """The command line of one training."""
    return [
        *(sys.executable, "-m", "fairseq_cli.train", str(args.data)),
        *("--user-dir", str(Path(spectral_fairseq.__file__).parent)),
        *METHODS[method].split(),
        *RECIPE.split(),
        *("--adam-betas", "(0.9, 0.98)", "--seed", str(seed)),
        *("--save-dir", str(args.out / "checkpoints")),  # fairseq creates it even with --no-save
        *("--max-update", str(args.updates)),
        *_sizes(*((16, 1) if args.tiny else (512, 6))),
        *(["--cpu"] if args.device == "cpu" else ["--fp16"]),
    ]


def measured(args: argparse.Namespace, report: Report, method: str, seed: int) -> Dict[str, Any]:
    """Train within the minutes that are left; updates a second, and the last validation."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
    started = time.monotonic()
    log = args.out / f"train-{method.replace(' ', '-')}-{seed}.log"
    with log.open("wb") as stream:
        subprocess.run(
            command(args, method, seed),
            env=env,
            stdout=stream,
            stderr=subprocess.STDOUT,
            timeout=max(report.seconds_left, 1),
            check=True,
        )
    text = log.read_text("utf-8", "replace")
    inner = [json.loads(one) for one in re.findall(r"\| train_inner \| (\{.*\})", text)]
    valid = [json.loads(one) for one in re.findall(r"\| valid \| (\{.*\})", text)]
    late = inner[len(inner) // 2 :]  # warm by then
    found: Dict[str, Any] = {"seconds": time.monotonic() - started}
    if late:
        found["updates_per_second"] = statistics.median(float(one["ups"]) for one in late)
    if valid:
        found["valid_nll_loss"] = float(valid[-1]["valid_nll_loss"])
        found["updates"] = int(valid[-1]["valid_num_updates"])
    return found


def run(args: argparse.Namespace, report: Report) -> None:
    for seed, method in itertools.product(SEEDS, METHODS):
        if not report.add(
            lambda m=method, s=seed: measured(args, report, m, s), method=method, seed=seed
        ):
            return
