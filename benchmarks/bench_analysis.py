"""Time and memory of measuring a large table, as ``spectral-fairseq analyze`` does.

    python -m benchmarks.bench_analysis [--rows 267735] [--dim 1024] [--threads 2] [--kind plain]
    python -m benchmarks.bench_analysis --rows 128256 --dim 4096 --kind safetensors [--threads 2]
    python -m benchmarks.bench_analysis --log-probabilities 80000 10000 [--threads 2]

A synthetic checkpoint is written to a temporary folder (a cone: a Gaussian table with a common
direction), then hashed, read and measured in a fresh process: all words for I1 and I2, singular
values, cosines, fits, norms. Budget at the default size: 60 s and 4 GiB on two cores. The kind
safetensors stores bfloat16, as large language models do. Budget at the size above, the table of a
model of 8 billion parameters: 90 s and 6 GiB.

With --log-probabilities it is the spectrum, the rank and the pairwise divergence of that many
tokens x words: those of a softmax over 280 dimensions, made block by block, so that the rank must
be 281. Budget: 8 GiB.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, Dict

import torch

from benchmarks.harness import (
    in_fresh_process,
    peak_resident_mib,
    positive,
    print_result,
    print_table,
)
from spectral_fairseq.analysis.options import Options, StepCallback
from spectral_fairseq.analysis.results import analyse_model
from spectral_fairseq.functional.blockwise_spectrum import BlockwiseSpectrum
from spectral_fairseq.functional.empirical_rank import empirical_rank
from spectral_fairseq.functional.pairwise_kl import ExpectedPairwiseKL

MODULE = "benchmarks.bench_analysis"
BUDGET = {"seconds": 60.0, "mib": 4096.0}
SAFETENSORS_BUDGET = {"seconds": 90.0, "mib": 6144.0}
LOG_PROBABILITY_BUDGET = {"mib": 8192.0}
DIMENSIONS = 280
# About 64 MiB of float64 at 10,000 words, as commands/predictions.py hands them over.
BLOCK_TOKENS = 838


def write_checkpoint(path: Path, rows: int, dim: int, kind: str) -> None:
    torch.manual_seed(1)
    if kind == "safetensors":
        from safetensors.torch import save_file

        narrow = torch.empty(rows, dim, dtype=torch.bfloat16)
        for block in narrow.split(4096):
            block.copy_((torch.randn(block.shape) + 0.5) / dim**0.5)
        save_file({"lm_head.weight": narrow}, path)
        return
    table = torch.randn(rows, dim).div_(dim**0.5).add_(0.5 / dim**0.5)
    name = "decoder.embed_tokens"
    if kind == "svd":
        model = {
            f"{name}.U": table,
            f"{name}.sigma": torch.ones(dim),
            f"{name}.V": 16 * torch.eye(dim),
            f"{name}.scale": torch.tensor(rows**0.5 / dim**0.5),
            f"{name}.initial_norm": torch.tensor(rows**0.5),
        }
    else:
        model = {f"{name}.weight": table}
    torch.save({"args": None, "cfg": None, "model": model}, path)


class _Steps(StepCallback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: Dict[str, float] = {}
        self._name, self._since = "", 0.0

    def begin(self, step: str, units: float = 1) -> None:  # noqa: ARG002
        now = time.perf_counter()
        if self._name:
            self.seconds[self._name] = round(now - self._since, 2)
        self._name, self._since = step, now


def measure(path: str, threads: int, words: int) -> None:
    torch.set_num_threads(threads)
    started = time.perf_counter()
    heard = _Steps()
    analyse_model(path, Options(isotropy_words=words), progress=heard)
    heard.begin("end")
    seconds = time.perf_counter() - started
    figures = {"seconds": seconds, "cpu_seconds": time.process_time(), "mib": peak_resident_mib()}
    print(json.dumps({**figures, "steps": heard.seconds}))


def measure_log_probabilities(tokens: int, words: int, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    table = torch.randn(words, DIMENSIONS).t()
    heard = _Steps()
    started = time.perf_counter()
    spectrum, divergence = BlockwiseSpectrum(tokens, words), ExpectedPairwiseKL(words)
    heard.begin("log-probabilities and Gram matrix")
    for start in range(0, tokens, BLOCK_TOKENS):
        hidden = torch.randn(min(BLOCK_TOKENS, tokens - start), DIMENSIONS) / DIMENSIONS**0.5
        block = (3 * hidden @ table).log_softmax(1)
        spectrum.add(block)
        divergence.add(block)
    heard.begin("eigenvalues")
    sigma = spectrum.singular_values()
    heard.begin("end")
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - started,
                "cpu_seconds": time.process_time(),
                "mib": peak_resident_mib(),
                "rank": empirical_rank(sigma, tokens, words),
                "expected_pairwise_kl": divergence.value(),
                "steps": heard.seconds,
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=positive, default=267_735)
    parser.add_argument("--dim", type=positive, default=1024)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--kind", choices=("plain", "svd", "safetensors"), default="plain")
    parser.add_argument("--isotropy-words", type=int, default=0)
    parser.add_argument(
        "--log-probabilities",
        metavar=("TOKENS", "WORDS"),
        nargs=2,
        type=int,
        help="measure a matrix of log-probabilities instead of a table",
    )
    parser.add_argument("--measure", metavar="CKPT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure and args.log_probabilities:
        tokens, words = args.log_probabilities
        measure_log_probabilities(tokens, words, args.threads)
        return
    if args.measure:
        measure(args.measure, args.threads, args.isotropy_words)
        return
    if args.log_probabilities:
        tokens, words = args.log_probabilities
        options = ["--measure", "none", "--log-probabilities", str(tokens), str(words)]
        found = in_fresh_process(MODULE, [*options, "--threads", str(args.threads)])
        sizes = {"tokens": tokens, "words": words, "torch_threads": args.threads}
        report(found, sizes, LOG_PROBABILITY_BUDGET)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        write_checkpoint(path, args.rows, args.dim, args.kind)
        options = [
            "--measure",
            str(path),
            "--threads",
            str(args.threads),
            "--isotropy-words",
            str(args.isotropy_words),
        ]
        found = in_fresh_process(MODULE, options)
    sizes = {
        "rows": args.rows,
        "dim": args.dim,
        "kind": args.kind,
        "torch_threads": args.threads,
        "isotropy_words": args.isotropy_words,
    }
    report(found, sizes, SAFETENSORS_BUDGET if args.kind == "safetensors" else BUDGET)


def report(found: Dict[str, Any], sizes: Dict[str, Any], budget: Dict[str, float]) -> None:
    print_table([{"step": name, "seconds": seconds} for name, seconds in found["steps"].items()])
    print_result("analysis", **sizes, **found, budget=budget)


if __name__ == "__main__":
    main()
