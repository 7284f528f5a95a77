"""The softmax's loss with all scores at once and block by block, over sizes: what `auto` rests on.

Usage: python -m benchmarks.bench_loss_form [--threads 1] [--precision fp32] [--quick]

Forward and backward of the loss alone, label smoothing 0.1: fairseq's, from the scores of tokens x
words, and the blockwise form. They take turns; a ratio is of the processor time of one turn, and
with several threads of its time on the clock, for which the machine has to be idle. Sizes whose
dense form would take more than 12 GiB are left out.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any, Callable, Dict, List

import torch
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import PRECISIONS, clock, positive, print_result, print_table
from spectral_fairseq.functional.softmax_loss import blockwise_cross_entropy

DIMS, WORDS, TOKENS = (64, 256, 1024), (4_000, 32_000, 267_735), (512, 2_048, 8_192)
# In bfloat16 the choice is one of tokens over d.
DIMS_OF_HALVES, WORDS_OF_HALVES = (128, 256, 512, 1024), (4_000, 10_000, 32_000, 100_000)
TOKENS_PER_DIMENSION = (0.125, 0.5, 1, 1.5, 2, 3)
EPSILON = 0.1
LARGEST = 12 * 2**30  # of the scores, their log-probabilities and the gradient, in float32


def fits(words: int, tokens: int) -> bool:
    """Whether the dense form of this size is tried at all."""
    return words * tokens * 3 * 4 <= LARGEST


def dense(features: Tensor, targets: Tensor, table: Tensor) -> Tensor:
    """fairseq's loss."""
    scores = functional.linear(features, table)
    log_p = functional.log_softmax(scores, dim=-1, dtype=torch.float32)
    return label_smoothed_nll_loss(log_p, targets.unsqueeze(1), EPSILON)[0]


def blockwise(features: Tensor, targets: Tensor, table: Tensor) -> Tensor:
    """The loss of ``--loss-form blockwise``."""
    return blockwise_cross_entropy(features, targets, table, label_smoothing=EPSILON)[0]


def step(form: Callable[..., Tensor], inputs: List[Tensor]) -> float:
    """Seconds of a forward and a backward pass, of the processor if there is one thread."""
    features, _, table = inputs
    features.grad = table.grad = None
    begun = clock()
    form(*inputs).backward()
    return clock() - begun


def measure(dim: int, words: int, tokens: int, dtype: torch.dtype, seconds: float) -> List[float]:
    """Ratios of the turns, at least two, and at most nine or as many as fit into ``seconds``."""
    features = torch.randn(tokens, dim, dtype=dtype).requires_grad_()
    table = (torch.randn(words, dim) * dim**-0.5).to(dtype).requires_grad_()
    inputs = [features, torch.randint(words, (tokens,)), table]
    ratios: List[float] = []
    ends = time.monotonic() + seconds
    for turn in range(10):
        first = step(blockwise if turn % 2 else dense, inputs)
        second = step(dense if turn % 2 else blockwise, inputs)
        if turn:  # the first one is a warm-up
            ratios.append(first / second if turn % 2 else second / first)
        if len(ratios) >= 2 and time.monotonic() > ends:
            break
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--seconds", type=positive, default=20, help="a size, about")
    parser.add_argument("--quick", action="store_true", help="one tiny size")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes = itertools.product(DIMS, WORDS, TOKENS)
    if args.precision == "bf16":
        some = itertools.product(DIMS_OF_HALVES, WORDS_OF_HALVES, TOKENS_PER_DIMENSION)
        sizes = ((dim, words, int(share * dim)) for dim, words, share in some)
    if args.quick:
        sizes = iter([(16, 100, 32)])
    rows: List[Dict[str, Any]] = []
    for dim, words, tokens in sizes:
        if fits(words, tokens):
            found = measure(dim, words, tokens, PRECISIONS[args.precision], args.seconds)
            row = {"d": dim, "V": words, "tokens": tokens, "time": statistics.median(found)}
            rows.append({**row, "lowest": min(found), "highest": max(found)})
            print(rows[-1], flush=True)
    print_table(rows)
    print_result(
        "loss_form", rows=rows, threads=args.threads, precision=args.precision, device="cpu"
    )


if __name__ == "__main__":
    main()
