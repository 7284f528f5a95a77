"""Beam search with a softmax, as bare fairseq searches, and with mixtures of softmaxes.

    python -m benchmarks.bench_decoding [--components 1 5 15] [--words N] [--repetitions N]

All translate the same random sentences, beam 5, to the same fixed length, A B A B in one process;
weights are random, so only the time means anything.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
from types import SimpleNamespace
from typing import Any, Callable, Dict

import torch
from fairseq.models import build_model
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf

import spectral_fairseq.plugin  # noqa: F401  (registers with fairseq)
from benchmarks.bench_step import vocabulary
from benchmarks.harness import (
    PRECISIONS,
    add_device_options,
    median_ratio,
    paired_times,
    positive,
    print_result,
    print_table,
)

LENGTH, BEAM = 20, 5
Search = Callable[..., Any]


def searching(
    dictionary: Any, head: str, components: int, args: argparse.Namespace, search: Search
) -> Callable[[], None]:
    torch.manual_seed(1)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    sizes = {f"{side}_embed_dim": args.dim for side in ("encoder", "decoder")}
    sizes.update({f"{side}_ffn_embed_dim": 2 * args.dim for side in ("encoder", "decoder")})
    sizes.update({f"{side}_layers": 6 for side in ("encoder", "decoder")})
    config = OmegaConf.create(
        {
            "model": {
                "_name": "transformer_mos",
                "output_head": head,
                "mixture_components": components,
                "share_all_embeddings": True,
                **sizes,
            }
        }
    )
    model = build_model(config.model, task).to(args.device, PRECISIONS[args.precision]).eval()
    generator = SequenceGenerator(
        [model], dictionary, beam_size=BEAM, max_len_a=0, max_len_b=LENGTH, min_len=LENGTH
    )
    source = torch.randint(4, len(dictionary), (args.sentences, LENGTH)).to(args.device)
    sample = {
        "net_input": {
            "src_tokens": source,
            "src_lengths": torch.full((args.sentences,), LENGTH).to(args.device),
        }
    }

    @torch.no_grad()
    def run() -> None:
        search(generator, [model], sample)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--components", type=positive, nargs="+", default=[1, 5, 15])
    parser.add_argument("--sentences", type=positive, default=16, help="of a batch")
    parser.add_argument("--words", type=positive, default=10_000)
    parser.add_argument("--dim", type=positive, default=512)
    parser.add_argument("--repetitions", type=positive, default=3)
    add_device_options(parser)
    args = parser.parse_args()
    dictionary = vocabulary(args.words)
    ours = SequenceGenerator.generate
    alternatives: Dict[str, Callable[[], None]] = {
        "softmax": searching(dictionary, "softmax", 1, args, ours),
        "softmax, bare fairseq": searching(dictionary, "softmax", 1, args, inspect.unwrap(ours)),
    }
    for components in args.components:
        name = f"mos, K = {components}"
        alternatives[name] = searching(dictionary, "mos", components, args, ours)
    times = paired_times(alternatives, args.repetitions)
    rows = [
        {
            "output": name,
            "tokens/s": args.sentences * LENGTH / statistics.median(seconds),
            "times softmax": median_ratio(seconds, times["softmax"]),
        }
        for name, seconds in times.items()
    ]
    print_table(rows)
    sizes = {name: getattr(args, name) for name in ("sentences", "words", "dim", "precision")}
    print_result("decoding", beam=BEAM, rows=rows, **sizes)


if __name__ == "__main__":
    main()
