"""Memory of the blockwise losses over many batches, each of another number of tokens.

    python -m benchmarks.bench_block_memory [--batches 60 480]

``stock`` is torch's linear and log_softmax, ``blockwise`` this package's loss, ``every-shape`` the
same with the last block of a batch left as it is, so that every number of tokens brings new shapes
to the products: Note [Few shapes] in ``functional/blocks.py``. The figure is the
rise of the peak resident set, forward and backward, in a process of its own.
"""

from __future__ import annotations

import argparse
import random
from unittest.mock import patch

import torch
import torch.nn.functional as F

from benchmarks import harness
from spectral_fairseq.functional import blocks
from spectral_fairseq.functional.mixture_loss import mixture_cross_entropy
from spectral_fairseq.functional.softmax_loss import blockwise_cross_entropy
from tests.reference import losses as reference

VARIANTS = ("stock", "blockwise", "every-shape")
SMOOTHING = 0.1


def train(variant: str, components: int, words: int, dim: int, batches: int) -> None:
    """Forward and backward over batches of 300 to 1,600 tokens; one softmax where K = 1."""
    torch.manual_seed(1)
    sizes = random.Random(1)
    table = (torch.randn(words, dim) * dim**-0.5).requires_grad_()
    for _ in range(batches):
        tokens = sizes.randint(300, 1600)
        targets = torch.randint(0, words, (tokens,))
        if components > 1:
            contexts = torch.randn(tokens, components, dim).requires_grad_()
            prior = F.log_softmax(torch.randn(tokens, components), -1)
            loss, *_ = mixture_cross_entropy(
                contexts, prior, targets, table, label_smoothing=SMOOTHING
            )
        else:
            contexts = torch.randn(tokens, dim).requires_grad_()
            if variant == "stock":
                log_p = F.log_softmax(F.linear(contexts, table), -1)
                loss, _ = reference.smoothed_nll(log_p, targets, SMOOTHING)
            else:
                loss, *_ = blockwise_cross_entropy(
                    contexts, targets, table, label_smoothing=SMOOTHING
                )
        loss.backward()
        table.grad = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--components", type=harness.positive, nargs="+", default=[1, 4])
    parser.add_argument("--words", type=harness.positive, default=6000)
    parser.add_argument("--dim", type=harness.positive, default=128)
    parser.add_argument("--batches", type=harness.positive, nargs="+", default=[60, 480])
    parser.add_argument("--memory", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        variant, *sizes = args.memory
        rows_for = blocks.rows_for
        if variant == "every-shape":
            rows_for = min
        with patch.object(blocks, "rows_for", rows_for):
            print(harness.extra_memory_mib(lambda: train(variant, *map(int, sizes))))
        return

    rows = []
    for components in args.components:
        # torch has no mixture to compare with.
        for variant in VARIANTS[components > 1 :]:
            for batches in args.batches:
                sizes = (components, args.words, args.dim, batches)
                arguments = ["--memory", variant, *map(str, sizes)]
                mib = harness.in_fresh_process("benchmarks.bench_block_memory", arguments)
                rows.append(
                    {"K": components, "variant": variant, "batches": batches, "peak MiB": mib}
                )
    harness.print_table(rows)
    harness.print_result("block_memory", words=args.words, dim=args.dim, rows=rows)


if __name__ == "__main__":
    main()
