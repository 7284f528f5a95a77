"""A training step of the AWD-LSTM: against the public implementation, and MoS against a softmax.

    git clone https://github.com/salesforce/awd-lstm-lm reference
    python -m benchmarks.bench_awd_lstm --shape wt2 --reference reference
    git clone https://github.com/zihangdai/mos mos-reference
    python -m benchmarks.bench_awd_lstm --shape mos-ptb --mos-reference mos-reference

A step is forward, loss with activation regularisation, backward, clipping and SGD, on segments of
equal length, with all dropouts. ``ours`` takes the head's blockwise loss, as ``--loss-form
blockwise`` does (a mixture always does); ``ours-dense`` the full scores, as a stock criterion
would. The public implementations are run as they are. Without clones only our own variants are
compared.

``product ratio`` is that of the multiplications in the matrix products of a mixture and of a
softmax model of the same shape: what a mixture must cost where products are all.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F

from benchmarks import harness
from spectral_fairseq.embeddings import PlainEmbedding
from spectral_fairseq.functional.activation_penalties import (
    activation_regularization,
    temporal_activation_regularization,
)
from spectral_fairseq.heads import MixtureOfSoftmaxes, SoftmaxHead
from spectral_fairseq.lm.averaged_sgd import AveragedSGD
from spectral_fairseq.lm.awd_lstm import AWDLSTM, TIME, detached

# words, d, hidden, last, components, streams, segment
SHAPES: Dict[str, Tuple[int, int, int, int, int, int, int]] = {
    "ptb": (10_000, 400, 1150, 400, 0, 20, 70),
    "wt2": (33_278, 400, 1150, 400, 0, 80, 70),
    "mos-ptb": (10_000, 280, 960, 620, 15, 12, 70),
    "sotu": (16_398, 128, 256, 128, 0, 20, 35),
}
LAYERS = 3
DROPOUT = {"dropout": 0.4, "input_dropout": 0.4, "hidden_dropout": 0.25, "weight_drop": 0.5}
WORD_DROPOUT, LATENT_DROPOUT, ALPHA, BETA, CLIP, LR = 0.1, 0.29, 2.0, 1.0, 0.25, 30.0


def batch(shape: Tuple[int, ...]) -> Tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and targets, each of shape (streams, segment)."""
    words, *_, streams, segment = shape
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(2, words, (streams, segment + 1), generator=generator)
    return text[:, :-1], text[:, 1:].contiguous()


def ours(shape: Tuple[int, ...], *, dense: bool, mixture: bool) -> Callable[[], None]:
    """A step of this package's model."""
    words, dim, hidden, last, components = shape[:5]
    if not mixture:
        last = dim
    table = PlainEmbedding(words, dim, 1)
    network = AWDLSTM(table, hidden, last, LAYERS, word_dropout=WORD_DROPOUT, **DROPOUT)
    head: Any
    if mixture:
        head = MixtureOfSoftmaxes(
            table, last, components, LATENT_DROPOUT, bias=True, locked_dim=TIME
        )
    else:
        head = SoftmaxHead(table, bias=True)
    model = torch.nn.ModuleDict({"network": network, "head": head}).train()
    optimizer = AveragedSGD(model.parameters(), lr=LR)
    tokens, targets = batch(shape)
    state: List[Any] = [None]

    def step() -> None:
        optimizer.zero_grad()
        dropped, raw, after = network(tokens, state[0])
        state[0] = detached(after)
        if dense:
            scores = head(dropped).flatten(0, 1)
            nll = F.cross_entropy(scores, targets.flatten())
        else:
            nll = head.loss(dropped, targets)[0] / targets.numel()
        loss = nll + ALPHA * activation_regularization(dropped)
        loss = loss + BETA * temporal_activation_regularization(raw)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return step


def reference(shape: Tuple[int, ...], folder: Path, mixture: bool) -> Callable[[], None]:
    """A step as in the public ``main.py``, with the public model and loss."""
    words, dim, hidden, last, components = shape[:5]
    module = module_from(folder, "model")
    sizes = ("LSTM", words, dim, hidden) + ((last,) if mixture else ())
    dropouts = (
        DROPOUT["dropout"],
        DROPOUT["hidden_dropout"],
        DROPOUT["input_dropout"],
        WORD_DROPOUT,
        DROPOUT["weight_drop"],
        True,
    )
    more = (LATENT_DROPOUT, components) if mixture else ()
    model = module.RNNModel(*sizes, LAYERS, *dropouts, *more).train()
    criterion = (
        None if mixture else module_from(folder, "splitcross").SplitCrossEntropyLoss(dim, [])
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    tokens, targets = (part.t().contiguous() for part in batch(shape))
    hidden_state = [model.init_hidden(tokens.size(1))]

    def step() -> None:
        optimizer.zero_grad()
        output, after, raw, dropped = model(tokens, hidden_state[0], return_h=True)
        hidden_state[0] = [tuple(part.detach() for part in layer) for layer in after]
        if criterion is None:
            nll = F.nll_loss(output.view(-1, words), targets.view(-1))
        else:
            nll = criterion(model.decoder.weight, model.decoder.bias, output, targets.view(-1))
        loss = nll + ALPHA * dropped[-1].pow(2).mean()
        loss = loss + BETA * (raw[-1][1:] - raw[-1][:-1]).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return step


def module_from(folder: Path, name: str) -> Any:
    """A module of a clone of a public implementation; two clones have modules of the same name."""
    sys.path.insert(0, str(folder))
    try:
        for stale in ("model", "splitcross", "embed_regularize", "locked_dropout", "weight_drop"):
            sys.modules.pop(stale, None)
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def products(shape: Tuple[int, ...], mixture: bool) -> int:
    """Multiplications of one token's matrix products, forward."""
    words, dim, hidden, last, components = shape[:5]
    last = last if mixture else dim
    recurrent = 4 * hidden * (dim + hidden) + (LAYERS - 2) * 8 * hidden**2
    recurrent += 4 * last * (hidden + last)
    if not mixture:
        return recurrent + words * dim
    return recurrent + components * (last + last * dim + words * dim)


def variants(
    args: argparse.Namespace, shape: Tuple[int, ...]
) -> Dict[str, Callable[[], Callable[[], None]]]:
    """What is compared on a shape: name -> what builds a model and returns its step."""
    mixture = bool(shape[4])
    chosen = {
        "ours": lambda: ours(shape, dense=False, mixture=mixture),
        "ours-dense": lambda: ours(shape, dense=True, mixture=mixture),
    }
    if mixture:
        chosen["ours-softmax"] = lambda: ours(shape, dense=False, mixture=False)
    folder: Optional[Path] = args.mos_reference if mixture else args.reference
    if folder is not None:
        chosen["reference"] = lambda: reference(shape, folder, mixture)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="sotu")
    parser.add_argument("--reference", type=Path, help="clone of salesforce/awd-lstm-lm")
    parser.add_argument("--mos-reference", type=Path, help="clone of zihangdai/mos")
    parser.add_argument("--repetitions", type=harness.positive, default=5)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    builders = variants(args, shape)
    torch.manual_seed(1)
    if args.memory:
        step = builders[args.memory]()
        print(harness.extra_memory_mib(step))
        return
    times = harness.paired_times(
        {name: build() for name, build in builders.items()}, args.repetitions
    )
    arguments = ["--shape", args.shape]
    for flag, folder in (("--reference", args.reference), ("--mos-reference", args.mos_reference)):
        arguments += [flag, str(folder)] if folder else []
    tokens = shape[-1] * shape[-2]
    rows = [
        {
            "variant": name,
            "words/s": tokens / sorted(taken)[len(taken) // 2],
            "time/ours": harness.median_ratio(taken, times["ours"]),
            "extra MiB": harness.in_fresh_process(
                "benchmarks.bench_awd_lstm", [*arguments, "--memory", name]
            ),
        }
        for name, taken in times.items()
    ]
    harness.print_table(rows)
    figures: Dict[str, Any] = {"shape": args.shape, "sizes": shape, "rows": rows}
    if shape[4]:
        figures["product_ratio"] = products(shape, True) / products(shape, False)
        figures["time_ratio"] = harness.median_ratio(times["ours"], times["ours-softmax"])
        print(
            f"mixture/softmax: products {figures['product_ratio']:.2f}, "
            f"time {figures['time_ratio']:.2f}"
        )
    harness.print_result("awd_lstm", **figures)


if __name__ == "__main__":
    main()
