"""What the methods of spectral_fairseq.training cost a model of the size of GPT-2 small.

    python -m benchmarks.bench_training [--shape gpt2|tiny] [--tokens T] [--pairs N]
                                        [--device cpu|cuda] [--precision fp32|bf16|fp16]

Two comparisons, each in turns in one process, A B A B. ``control``: a training step, and the
change that SpectrumControl makes to its table at every tenth one; the ratio is
1 + change / (10 step), pair by pair. ``loss``: the output layer and its loss with their gradients,
from the hidden states of T tokens; dense, with finished logits in float32 as transformers computes
it, and by blocks, with fused_loss_. Memory: what either of them adds to the peak of a process of
its own that has the table already.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any, Callable, Dict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import (
    PRECISIONS,
    add_device_options,
    device_arguments,
    extra_memory_mib,
    in_fresh_process,
    median_ratio,
    paired_times,
    positive,
    print_result,
    print_table,
)
from spectral_fairseq.training import SpectrumControl, fused_loss_

# Words, width, layers, heads, tokens of a step.
SHAPES = {"gpt2": (50257, 768, 12, 12, 1024), "tiny": (300, 16, 1, 2, 32)}
EVERY = 10  # the default of SpectrumControl


class Model(nn.Module):
    """A causal Transformer in the sizes of GPT-2, whose look-up and output layer share a table."""

    def __init__(self, words: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.lm_head = nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Any:
        """Scores of the next words, shape (B, T, N)."""
        length = tokens.size(1)
        mask = torch.full((length, length), float("-inf"), device=tokens.device).triu(1)
        return self.lm_head(self.layers(self.embed(tokens), mask=mask))


class Output(nn.Module):
    """The output layer alone."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.lm_head = nn.Linear(width, words, bias=False)

    def forward(self, features: Tensor) -> Any:
        """Scores, shape (B, T, N)."""
        return self.lm_head(features)


LOSSES = ("transformers", "fused_loss_", "torch in chunks")  # the last one from torch 2.13 on


def loss_of(kind: str, words: int, width: int, tokens: int, **options: Any) -> Callable[[], Tensor]:
    """A loss of one kind, of an output layer with the same entries each time, without gradients.

    Args:
        kind: one of :data:`LOSSES`.
        words: N.
        width: d.
        tokens: of the batch.
        **options: device and dtype.
    """
    torch.manual_seed(0)
    model = Output(words, width).to(**options)
    features = torch.randn(1, tokens, width, **options).requires_grad_()
    labels = torch.randint(words, (1, tokens), device=options.get("device"))
    targets = F.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
    fused = fused_loss_(model, shift=True) if kind == "fused_loss_" else None

    def loss() -> Tensor:
        model.zero_grad()
        features.grad = None
        if fused is not None:
            return fused(model(features), labels)
        if kind == "transformers":  # as its ForCausalLMLoss
            return F.cross_entropy(model(features).float().flatten(0, 1), targets)
        chunks: Any = nn.LinearCrossEntropyOptions()
        table = model.lm_head.weight
        return F.linear_cross_entropy(features.flatten(0, 1), table, targets, options=chunks)

    return loss


def loss_step(kind: str, args: argparse.Namespace) -> Callable[[], None]:
    """The loss of one kind with its gradients."""
    words, width, *_ = SHAPES[args.shape]
    dtype = PRECISIONS[args.precision]
    loss = loss_of(kind, words, width, args.tokens, device=args.device, dtype=dtype)
    return lambda: loss().backward()


def loss_figures(args: argparse.Namespace) -> Dict[str, Any]:
    """Time and memory of the loss by blocks over those of the dense one."""
    dense, fused = LOSSES[:2]
    times = paired_times({kind: loss_step(kind, args) for kind in (dense, fused)}, args.pairs)
    sizes = ["--shape", args.shape, "--tokens", str(args.tokens), *device_arguments(args)]
    memory = {
        kind: in_fresh_process("benchmarks.bench_training", ["--memory", kind, *sizes])
        for kind in (dense, fused)
    }
    return {
        "dense_s": statistics.median(times[dense]),
        "fused_s": statistics.median(times[fused]),
        "time_ratio": median_ratio(times[fused], times[dense]),
        "dense_mib": memory[dense],
        "fused_mib": memory[fused],
        "memory_ratio": memory[fused] / memory[dense],
    }


def control_figures(args: argparse.Namespace) -> Dict[str, Any]:
    """Time of a training step, and of the control over it."""
    words, width, layers, heads, _ = SHAPES[args.shape]
    torch.manual_seed(0)
    model = Model(words, width, layers, heads).to(args.device)
    loss = fused_loss_(model, shift=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    length = min(args.tokens, 512)
    tokens = torch.randint(words, (max(1, args.tokens // length), length), device=args.device)
    with torch.no_grad():  # a direction that stands out, so that there is something to change
        model.embed.weight.add_(0.02)
    control = SpectrumControl(model, every=1)

    def step() -> None:
        optimizer.zero_grad()
        half = args.precision != "fp32"  # torch 1.12 refuses any other dtype, enabled or not
        dtype = PRECISIONS[args.precision] if half else torch.bfloat16
        with torch.autocast(args.device, dtype, enabled=half):
            outputs = model(tokens)
        loss(outputs, tokens).backward()
        optimizer.step()

    def change() -> None:
        control.step(1.0)

    times = paired_times({"step": step, "change": change}, args.pairs)
    share = median_ratio(times["change"], times["step"])
    return {
        "step_s": statistics.median(times["step"]),
        "change_s": statistics.median(times["change"]),
        "time_ratio": 1 + share / EVERY,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="gpt2")
    parser.add_argument("--tokens", type=positive, help="of a step; 1,024 for gpt2")
    parser.add_argument("--pairs", type=positive, default=5)
    parser.add_argument("--memory", choices=LOSSES, help=argparse.SUPPRESS)
    add_device_options(parser)
    args = parser.parse_args()
    args.tokens = args.tokens or SHAPES[args.shape][-1]
    if args.memory:
        print(extra_memory_mib(loss_step(args.memory, args), args.device))
        return
    words, width, layers, *_ = SHAPES[args.shape]
    print(
        f"{args.shape}: {words} x {width}, {layers} layers, {args.tokens} tokens, {args.device}",
        flush=True,
    )
    results = {"loss": loss_figures(args), "control": control_figures(args)}
    for name, figures in results.items():
        print_table([{"what": name, **figures}])
    print_result("training", shape=args.shape, tokens=args.tokens, device=args.device, **results)


if __name__ == "__main__":
    main()
