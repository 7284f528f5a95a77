"""The command line of :mod:`benchmarks.gpu`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional, Sequence

import torch

from benchmarks import gpu
from benchmarks.gpu import parity, speed, train
from benchmarks.gpu.report import Report, tables
from benchmarks.harness import PRECISIONS, positive

STAGES = {"parity": parity.run, "speed": speed.run, "train": train.run}


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu",
        description=gpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stage", nargs="?", choices=list(STAGES))
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no row after these")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the JSON")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--data", type=Path, help="binarised parallel corpus, for train")
    parser.add_argument("--updates", type=positive, default=20_000, help="of a training")
    precisions = list(PRECISIONS)
    parser.add_argument(
        "--precision", nargs="+", choices=precisions, default=precisions, help="of speed"
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="for each row of speed")
    parser.add_argument("--tiny", action="store_true", help="sizes at which figures mean nothing")
    parser.add_argument("--tables", action="store_true", help="print what was written, and stop")
    args = parser.parse_args(argv)
    if args.tables:
        print(tables(args.out))
        return
    if args.stage is None:
        parser.error("expected a stage or --tables")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("expected a CUDA device; found none (--device cpu --tiny is a dry run)")
    if args.stage == "train" and args.data is None:
        parser.error("expected --data FOLDER, from fairseq-preprocess, for train")
    STAGES[args.stage](args, Report(args.out, args.stage, args.minutes))


if __name__ == "__main__":
    main()
