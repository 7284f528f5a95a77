"""Milliseconds, memory, kernels and waits of the losses and of whole steps, beside other losses.

``dense`` is torch's linear and log_softmax as fairseq takes them, ``liger`` and
``cut-cross-entropy`` the fused losses of these packages where they are installed, ``torch`` its
``linear_cross_entropy`` where it has one. A mixture of cut-cross-entropies is
-logsumexp_k(log pi_k - CE_k).
"""

from __future__ import annotations

import argparse
import collections
import importlib
import itertools
import statistics
import time
import warnings
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

import torch
import torch.nn.functional as F

from benchmarks import bench_step, harness
from benchmarks.gpu.report import Report
from spectral_fairseq.functional.adaptive_loss import adaptive_cross_entropy
from spectral_fairseq.functional.mixture_loss import mixture_cross_entropy
from spectral_fairseq.functional.softmax_loss import blockwise_cross_entropy
from tests.reference import losses as reference


class Shape(NamedTuple):
    """Words N, dimensions d, tokens, experts K (0: one softmax; -1: adaptive), label smoothing."""

    words: int
    dim: int
    tokens: int
    experts: int = 0
    smoothing: float = 0.0


SHAPES = {
    "iwslt": Shape(10_000, 512, 4096, smoothing=0.1),
    "wmt14-big": Shape(32_768, 1024, 8192, smoothing=0.1),
    "wt103": Shape(267_744, 410, 4096),
    "llm": Shape(256_000, 2048, 4096),
    "mos-ptb": Shape(10_000, 280, 840, 15),
    "mos-iwslt": Shape(10_000, 512, 4096, 15),
    "mos-iwslt-smoothed": Shape(10_000, 512, 4096, 15, 0.1),
    "adaptive-wt103": Shape(267_744, 410, 4096, -1),
}
TINY = {"softmax": Shape(500, 16, 32, smoothing=0.1), "mos": Shape(500, 16, 32, 3)}
CUTOFFS = (20_000, 40_000, 200_000)
# Above this many scores the dense form, which holds several times as many, is left out.
DENSE_SCORES = 2**30

Loss = Callable[[], torch.Tensor]


def inputs(shape: Shape, device: str, precision: str) -> Tuple[torch.Tensor, ...]:
    """Contexts, logits of the prior or of the clusters, table and targets."""
    words, dim, tokens, experts, _ = shape
    dtype = harness.PRECISIONS[precision]
    torch.manual_seed(1)
    table = torch.randn(words, dim) * dim**-0.5
    contexts = torch.randn((tokens, experts, dim) if experts > 0 else (tokens, dim))
    logits = torch.randn(tokens, experts if experts > 0 else len(CUTOFFS))
    leaves = (contexts.to(device, dtype), logits.to(device), table.to(device, dtype))
    frequency = torch.ones(words - 4)
    if experts < 0:  # Zipf's law decides how many tokens fall into each cluster
        frequency = torch.arange(1.0, words - 3).pow(-1.25)
    targets = torch.multinomial(frequency, tokens, True) + 4
    return (*(leaf.requires_grad_() for leaf in leaves), targets.to(device))


def losses(shape: Shape, *given: torch.Tensor) -> Iterator[Tuple[str, Loss]]:
    """Name and loss of each variant, of what :func:`inputs` gives."""
    words, _, tokens, experts, eps = shape
    contexts, logits, table, targets = given
    options: Dict[str, Any] = {"label_smoothing": eps, "ignore_index": 1}
    cce = _imported("cut_cross_entropy", "linear_cross_entropy") if not eps else None
    if experts < 0:
        bias = table.new_zeros(words, dtype=torch.float32).requires_grad_()
        yield (
            "ours",
            lambda: adaptive_cross_entropy(contexts, logits, targets, table, bias, CUTOFFS),
        )
        return
    if experts:

        def prior() -> torch.Tensor:
            return F.log_softmax(logits, -1)

        if tokens * experts * words < DENSE_SCORES:
            mixed = reference.log_mixture
            yield (
                "dense",
                lambda: reference.smoothed_nll(mixed(contexts, prior(), table), targets, eps)[0],
            )
        yield (
            "ours",
            lambda: mixture_cross_entropy(contexts, prior(), targets, table, **options)[0],
        )
        if cce is not None:
            every = targets.repeat_interleave(experts)
            yield (
                "mixture of cut-cross-entropies",
                lambda: (
                    -torch.logsumexp(
                        prior()
                        - cce(contexts.flatten(0, 1), table, every, reduction="none").view(
                            -1, experts
                        ),
                        1,
                    ).sum()
                ),
            )
        return
    yield (
        "dense",
        lambda: reference.smoothed_nll(
            F.log_softmax(F.linear(contexts, table), -1, dtype=torch.float32), targets, eps
        )[0],
    )
    yield "ours", lambda: blockwise_cross_entropy(contexts, targets, table, **options)[0]
    liger = _imported(
        "liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"
    )
    if liger is not None:
        settings = (None, None, 1, 0.0, eps, "sum")
        yield "liger", lambda: liger.apply(contexts, table, targets, *settings)[0]
    if cce is not None:
        yield "cut-cross-entropy", lambda: cce(contexts, table, targets, reduction="sum")
    if hasattr(F, "linear_cross_entropy") and not eps:
        yield (
            "torch",
            lambda: F.linear_cross_entropy(
                contexts,
                table,
                targets,
                reduction="sum",
                options=torch.nn.LinearCrossEntropyOptions(),
            ),
        )


def _imported(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None


def measure(step: Callable[[], None], device: str, seconds: float) -> Dict[str, Any]:
    """Median milliseconds, peak MiB above what was allocated, kernels and waits of a step."""
    for _ in range(3 if device == "cuda" else 1):
        step()
    harness.synchronise()
    found: Dict[str, Any] = {}
    if device == "cuda":
        found["MiB"] = harness.extra_memory_mib(step, device)
        found["kernels"] = _kernels(step)
        found["waits"] = sum(waits(step).values())
    times, end = [], time.monotonic() + seconds
    while len(times) < 5 or (time.monotonic() < end and len(times) < 50):
        started = time.perf_counter()
        step()
        harness.synchronise()
        times.append(1e3 * (time.perf_counter() - started))
    return {"ms": statistics.median(times), "ms_min": min(times), **found}


def _kernels(step: Callable[[], None]) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == cuda for event in profile.events())


def waits(step: Callable[[], None]) -> Dict[str, int]:
    """Places at which the host waits for the GPU, by torch's own debug mode."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = (f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message))
    return dict(collections.Counter(places))


def run(args: argparse.Namespace, report: Report) -> None:
    if args.tiny:
        args.precision, args.seconds = ["fp32"], 0.0
    _whole_steps(args, report)
    _losses(args, report)


def _losses(args: argparse.Namespace, report: Report) -> None:
    for name, shape in (TINY if args.tiny else SHAPES).items():
        for precision in args.precision:
            *leaves, targets = inputs(shape, args.device, precision)
            for variant, loss in losses(shape, *leaves, targets):

                def step(loss: Loss = loss, leaves: List[torch.Tensor] = leaves) -> None:
                    loss().backward()
                    for leaf in leaves:
                        leaf.grad = None

                row = {"shape": name, "precision": precision, "variant": variant}
                if not report.add(lambda s=step: measure(s, args.device, args.seconds), **row):
                    return


def _whole_steps(args: argparse.Namespace, report: Report) -> None:
    names = ("tiny",) if args.tiny else ("iwslt", "weight-norm", "wikitext103", "xl-small")
    for case in itertools.product(names, args.precision, ("plain", "spectrum_control")):

        def whole(case: Tuple[str, ...] = case) -> Dict[str, Any]:
            name, precision, variant = case
            made = bench_step.Step(bench_step.SHAPES[name], variant, args.device, precision)
            return measure(made, args.device, args.seconds)

        name, precision, variant = case
        if variant != "plain":  # the key of a shape's own method, which may be another one
            variant = bench_step.SHAPES[name].get("method", "spectrum control")
        row = {"shape": f"step {name}", "precision": precision, "variant": variant}
        if not report.add(whole, **row):
            return
        if args.device == "cuda":
            torch.cuda.empty_cache()
