"""A mixture of softmaxes against one softmax and against the naive dense mixture.

    python -m benchmarks.bench_mixture [--components 1 5 10 15] [--plot growth.png]
                                       [--device cpu|cuda] [--precision fp32|bf16|fp16]

One measurement is the head alone, forward and backward: contexts in, gradients of contexts, prior,
table out. ``softmax`` is torch's linear and cross entropy; ``softmax-blockwise`` this package's;
``softmax-torch`` torch's own fused ``linear_cross_entropy``, where there is one; ``dense`` is
tests/reference/losses.py; ``mos`` the blockwise loss, ``mos-mm`` the same with torch.mm for the
products that oneDNN takes (functional/products.py), ``mos-stock`` a stock criterion's loss
of the head's log-mixture; names ending in ``-smoothed`` have label smoothing 0.1, those in
``-bf16`` run under autocast.

A processor without bfloat16 units emulates their products, so the last are left out there.

Time is paired in one process; memory is the rise of the peak resident set, or of what is allocated
on a GPU, in a process of its own.
"""

from __future__ import annotations

import argparse
from typing import Any, Callable, Dict, List, Tuple
from unittest.mock import patch

import torch
import torch.nn.functional as F

from benchmarks import harness
from spectral_fairseq.functional import products
from spectral_fairseq.functional.mixture_loss import log_mixture, mixture_cross_entropy
from spectral_fairseq.functional.processor import processor
from spectral_fairseq.functional.softmax_loss import blockwise_cross_entropy
from tests.reference import losses as reference

SMOOTHING = 0.1
DIMENSION, WORDS, TOKENS, COMPONENTS = 280, 10_000, 1024, 15
VARIANTS = (
    "softmax",
    "softmax-blockwise",
    "softmax-torch",
    "softmax-smoothed",
    "softmax-blockwise-smoothed",
    "dense",
    "mos",
    "mos-mm",
    "mos-stock",
    "dense-smoothed",
    "mos-smoothed",
    "dense-bf16",
    "mos-bf16",
)


def build(
    variant: str, components: int, words: int, tokens: int, args: argparse.Namespace
) -> Callable[[], None]:
    """One forward and backward pass of ``variant``, ready to run."""
    dtype = harness.PRECISIONS[args.precision]
    torch.manual_seed(1)
    smoothing = SMOOTHING if variant.endswith("-smoothed") else 0.0
    autocast = variant.endswith("-bf16")
    kind = variant.replace("-smoothed", "").replace("-bf16", "")
    mixed = not kind.startswith("softmax")
    shape = (tokens, components, DIMENSION) if mixed else (tokens, DIMENSION)
    contexts = torch.randn(shape).tanh_().to(args.device, dtype).requires_grad_()
    logits = torch.randn(tokens, components).to(args.device).requires_grad_()
    table = torch.randn(words, DIMENSION) * DIMENSION**-0.5
    table = table.to(args.device, dtype).requires_grad_()
    targets = torch.randint(0, words, (tokens,)).to(args.device)

    def loss() -> torch.Tensor:
        if kind == "softmax":
            log_p = F.log_softmax(F.linear(contexts, table), -1, dtype=torch.float32)
            return reference.smoothed_nll(log_p, targets, smoothing)[0]
        if kind == "softmax-blockwise":
            return blockwise_cross_entropy(contexts, targets, table, label_smoothing=smoothing)[0]
        if kind == "softmax-torch":
            return F.linear_cross_entropy(
                contexts,
                table,
                targets,
                reduction="sum",
                options=torch.nn.LinearCrossEntropyOptions(),
            )
        prior = F.log_softmax(logits, -1)
        if kind in ("mos", "mos-mm"):
            return mixture_cross_entropy(
                contexts, prior, targets, table, label_smoothing=smoothing
            )[0]
        mix = reference.log_mixture if kind == "dense" else log_mixture
        return reference.smoothed_nll(mix(contexts, prior, table), targets, smoothing)[0]

    def run() -> None:
        # The gradients are found in the forward pass, with all its products.
        linear = None if kind == "mos-mm" else products._ONEDNN_LINEAR
        with patch.object(products, "_ONEDNN_LINEAR", linear):
            with torch.autocast(args.device, enabled=autocast, dtype=torch.bfloat16):
                value = loss()
        value.backward()
        contexts.grad = logits.grad = table.grad = None

    return run


def measure(
    variants: List[str], sizes: Tuple[int, int, int], args: argparse.Namespace
) -> List[Dict[str, Any]]:
    """Rows of time and memory of ``variants`` at (K, N, tokens)."""
    repetitions = args.repetitions
    times = harness.paired_times({v: build(v, *sizes, args) for v in variants}, repetitions)
    rows = []
    for variant in variants:
        arguments = ["--memory", variant, *map(str, sizes), *harness.device_arguments(args)]
        rows.append(
            {
                "variant": variant,
                "K": sizes[0],
                "N": sizes[1],
                "tokens": sizes[2],
                "seconds": sorted(times[variant])[repetitions // 2],
                "MiB": harness.in_fresh_process("benchmarks.bench_mixture", arguments),
                "time/softmax": harness.median_ratio(times[variant], times["softmax"]),
            }
        )
    return rows


# variant -> label, colour of the palette of Okabe and Ito, marker: they differ without colour too.
SHOWN = {
    "softmax": ("one softmax", "#000000", "o"),
    "dense": ("mixture, tokens x K x N held", "#D55E00", "s"),
    "mos": ("mixture, block by block", "#0072B2", "^"),
}
AXES = {"K": "K, components", "N": "N, words", "tokens": "tokens"}


def plot(rows: List[Dict[str, Any]], path: str) -> None:
    """Time and memory against K, N and tokens."""
    from matplotlib import pyplot

    # Narrow enough for a phone, where a picture has 390 pixels.
    figure, axes = pyplot.subplots(3, 2, figsize=(3.9, 5.8), dpi=300)
    fixed = {"K": COMPONENTS, "N": WORDS, "tokens": TOKENS}
    for row, axis in enumerate(fixed):
        others = {key: value for key, value in fixed.items() if key != axis}
        for column, unit in enumerate(("seconds", "MiB")):
            panel = axes[row][column]
            for variant, (label, colour, marker) in SHOWN.items():
                points = sorted(
                    {
                        (r[axis], r[unit])
                        for r in rows
                        if r["variant"] == variant and all(r[k] == v for k, v in others.items())
                    }
                )
                panel.plot(*zip(*points), color=colour, marker=marker, markersize=4, label=label)
                panel.set_xticks([x for x, _ in points], [f"{x:,}" for x, _ in points], fontsize=8)
            panel.tick_params("y", labelsize=8)
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
            panel.set_xlabel(AXES[axis], fontsize=9)
    axes[0][0].set_title("seconds", fontsize=10)
    axes[0][1].set_title("extra memory, MiB", fontsize=10)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="upper center", fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.87))
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--components", type=harness.positive, nargs="+", default=[1, 5, 10, 15])
    parser.add_argument("--words", type=harness.positive, nargs="*", default=[5_000, 20_000])
    parser.add_argument("--tokens", type=harness.positive, nargs="*", default=[256, 2048])
    parser.add_argument("--repetitions", type=harness.positive, default=3)
    parser.add_argument("--plot", help="write the growth with K, N and tokens to this image")
    harness.add_device_options(parser)
    parser.add_argument("--memory", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        variant, *sizes = args.memory
        # A first pass over few tokens loads the kernels, which are not the head's memory.
        build(variant, int(sizes[0]), int(sizes[1]), 2, args)()
        print(harness.extra_memory_mib(build(variant, *map(int, sizes), args), args.device))
        return

    largest = max(args.components)
    variants = list(VARIANTS)
    if not hasattr(F, "linear_cross_entropy"):
        variants.remove("softmax-torch")
    if args.device == "cpu" and not processor().has_bfloat16:
        variants = [name for name in variants if not name.endswith("-bf16")]
    budget = measure(variants, (largest, WORDS, TOKENS), args)
    growth = ["softmax", "dense", "mos"]
    rows = list(budget)
    for components in args.components:
        if components != largest:
            rows += measure(growth, (components, WORDS, TOKENS), args)
    for words in args.words:
        rows += measure(growth, (largest, words, TOKENS), args)
    for tokens in args.tokens:
        rows += measure(growth, (largest, WORDS, tokens), args)
    harness.print_table(rows)
    if args.plot:
        plot(rows, args.plot)

    by_name = {row["variant"]: row for row in budget}
    softmax, dense, mos = (by_name[name] for name in growth)
    harness.print_result(
        "mixture",
        dimension=DIMENSION,
        device=args.device,
        precision=args.precision,
        rows=rows,
        speedup_over_dense=dense["seconds"] / mos["seconds"],
        softmaxes_of_time=mos["time/softmax"],
        memory_saving_over_dense=dense["MiB"] / mos["MiB"],
        softmaxes_of_memory=mos["MiB"] / softmax["MiB"],
    )


if __name__ == "__main__":
    main()
