"""A training step with spectrum control against the same step of plain fairseq.

    python -m benchmarks.bench_step
        [--shape iwslt|wikitext103|xl-small|weight-norm|weight-norm-small|tiny ...]
        [--device cpu|cuda] [--precision fp32|bf16|fp16] [--pairs N]

Time: both models live in one process and take steps in turn, A B A B; the ratio is formed pair by
pair, and its median is reported. Memory is the peak of a process for each model: the resident
set on a CPU, the allocator's peak on a GPU. A step is criterion, backward, clipping and Adam.

Where the orthogonality terms are computed every k-th update only, the spectrum-control time is
the mean over k updates, from steps with and without them.

The xl-small shape is Transformer-XL with an adaptive softmax, which plain fairseq does not have.
There, both variants are models of this package: a plain table without penalties, and an SVD table
with all penalties of spectrum control, the spectral norms included. Words are drawn by Zipf's law,
because the cost of a step depends on how many of them fall into each cluster.
"""

from __future__ import annotations

import argparse
import statistics
from argparse import Namespace
from types import SimpleNamespace
from typing import Any, Callable, Dict

import torch
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY, build_criterion
from fairseq.data import Dictionary
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    build_model,
)
from omegaconf import OmegaConf

import spectral_fairseq.plugin  # noqa: F401  (registers with fairseq)
from benchmarks.harness import (
    PRECISIONS,
    add_device_options,
    device_arguments,
    in_fresh_process,
    paired_times,
    peak_mib,
    positive,
    print_result,
    print_table,
)
from spectral_fairseq.lm.carry import Carry
from spectral_fairseq.plugin.objective import interval_for

SHAPES: Dict[str, Dict[str, Any]] = {
    "iwslt": {
        "what": "transformer_iwslt_de_en, N = 10,000, 4,096 target tokens a step",
        "words": 10_000,
        "sentences": 128,
        "length": 32,
        "archs": ("transformer_iwslt_de_en", "transformer_sc_iwslt_de_en"),
        "model": {
            "encoder_embed_dim": 512,
            "encoder_ffn_embed_dim": 1024,
            "encoder_layers": 6,
            "encoder_attention_heads": 4,
            "decoder_embed_dim": 512,
            "decoder_ffn_embed_dim": 1024,
            "decoder_layers": 6,
            "decoder_attention_heads": 4,
            "share_all_embeddings": True,
            "dropout": 0.3,
        },
        "budget": {"time": 1.05, "memory": 1.05},
    },
    "wikitext103": {
        "what": "transformer_lm, 4 layers, N = 267,735, d = 410, full tied softmax, 1,024 tokens",
        "words": 267_735,
        "sentences": 8,
        "length": 128,
        "archs": ("transformer_lm", "transformer_lm_sc"),
        "model": {
            "decoder_embed_dim": 410,
            "decoder_input_dim": 410,
            "decoder_output_dim": 410,
            "decoder_ffn_embed_dim": 2100,
            "decoder_layers": 4,
            "decoder_attention_heads": 10,
            "share_decoder_input_output_embed": True,
        },
        "budget": {"time": 1.10, "memory": 1.10},
    },
    "xl-small": {
        "what": "transformer_xl_wt103_small, N = 267,735, d = 410, adaptive softmax, 8 streams of "
        "150 tokens, memory 150",
        "words": 267_735,
        "sentences": 8,
        "length": 150,
        "stateful": True,
        # Of the tokens 96.4 % are then among the first 20,000 words; 1.2, 2.1 and 0.3 % fall into
        # the three clusters.
        "zipf": 1.25,
        "archs": ("transformer_xl_wt103_small", "transformer_xl_wt103_small"),
        "tables": ("plain", "svd"),
        "criterions": (
            {"_name": "regularized_cross_entropy"},
            {"_name": "spectrum_control", "orthogonality_weights": "0.001,0.001,0.001,0.001"},
        ),
        "model": {"spectrum_prior": "polynomial"},
        "budget": {"time": 1.10, "memory": 1.10},
    },
}
CRITERIONS = (
    {"_name": "label_smoothed_cross_entropy", "label_smoothing": 0.1},
    {"_name": "spectrum_control", "label_smoothing": 0.1},
)
SHAPES["weight-norm"] = {
    **SHAPES["iwslt"],
    "what": "the iwslt shape with a weight-norm table instead of spectrum control",
    "method": "weight-norm table",
    "tables": ("plain", "weight-norm"),
    "criterions": (
        CRITERIONS[0],
        {"_name": "regularized_cross_entropy", "label_smoothing": 0.1},
    ),
}
SHAPES["weight-norm-small"] = {
    **SHAPES["weight-norm"],
    "what": "the model of the study translation_small with a weight-norm table, N = 2,000, "
    "1,600 tokens",
    "words": 2_000,
    "sentences": 50,
    "model": {
        "encoder_embed_dim": 64,
        "encoder_ffn_embed_dim": 128,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_embed_dim": 64,
        "decoder_ffn_embed_dim": 128,
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
        "share_all_embeddings": True,
        "dropout": 0.1,
    },
}
SHAPES["tiny"] = {
    **SHAPES["iwslt"],
    "what": "the iwslt shape at width 32, to see that the benchmark runs",
    "words": 1_000,
    "sentences": 4,
    "length": 8,
    "model": {
        **SHAPES["iwslt"]["model"],
        "encoder_embed_dim": 32,
        "decoder_embed_dim": 32,
        "encoder_ffn_embed_dim": 64,
        "decoder_ffn_embed_dim": 64,
    },
}


def vocabulary(words: int) -> Dictionary:
    dictionary = Dictionary()
    for index in range(words - len(dictionary)):
        dictionary.add_symbol(str(index), n=words // (index + 1) + 1)
    return dictionary


class Step:
    """One model with its criterion and optimiser; calling it takes a training step."""

    def __init__(
        self, shape: Dict[str, Any], variant: str, device: str, precision: str = "fp32"
    ) -> None:
        torch.manual_seed(1)
        dictionary = vocabulary(shape["words"])
        self.task = task = SimpleNamespace(
            source_dictionary=dictionary, target_dictionary=dictionary
        )
        plain = variant == "plain"
        index = 0 if plain else 1
        options = dict(shape["model"])
        if "tables" in shape:
            options["embedding_type"] = shape["tables"][index]
        self.model = self._build_model(shape, task, shape["archs"][index], options)
        self.model.to(device, PRECISIONS[precision]).train()
        self.criterion = self._build_criterion(task, shape.get("criterions", CRITERIONS)[index])
        self.optimiser = torch.optim.Adam(self.model.parameters(), lr=1e-4, betas=(0.9, 0.98))
        self.sample = self._sample(shape, device, translation="encoder_layers" in shape["model"])

    @staticmethod
    def _build_model(
        shape: Dict[str, Any], task: Any, arch: str, options: Dict[str, Any]
    ) -> torch.nn.Module:
        if arch not in MODEL_DATACLASS_REGISTRY and ARCH_MODEL_NAME_REGISTRY[arch] == "transformer":
            args = Namespace(**options)  # an argparse-style arch of fairseq
            ARCH_CONFIG_REGISTRY[arch](args)
            return ARCH_MODEL_REGISTRY[arch].build_model(args, task)
        config = OmegaConf.create(
            {
                "model": {"_name": arch, **options},
                "common": {"tpu": False},
                "task": {
                    "add_bos_token": False,
                    "tokens_per_sample": shape["length"],
                    "max_target_positions": 1024,
                },
            }
        )
        return build_model(config.model, task)

    @staticmethod
    def _build_criterion(task: Any, flags: Dict[str, Any]) -> Any:
        config = OmegaConf.structured(CRITERION_DATACLASS_REGISTRY[flags["_name"]])
        OmegaConf.set_struct(config, False)
        return build_criterion(OmegaConf.merge(config, {"sentence_avg": False, **flags}), task)

    @staticmethod
    def _sample(shape: Dict[str, Any], device: str, translation: bool) -> Dict[str, Any]:
        size = (shape["sentences"], shape["length"])
        generator = torch.Generator().manual_seed(2)
        if "zipf" in shape:
            frequency = torch.arange(1.0, shape["words"] - 3).pow(-shape["zipf"])
            drawn = torch.multinomial(frequency, size[0] * size[1], True, generator=generator)
            tokens = (drawn + 4).view(size).to(device)
        else:
            tokens = torch.randint(4, shape["words"], size, generator=generator).to(device)
        lengths = torch.full((size[0],), size[1], device=device)
        inputs: Dict[str, Any] = {"src_tokens": tokens, "src_lengths": lengths}
        if shape.get("stateful"):
            inputs["carry"] = Carry()
        if translation:
            inputs["prev_output_tokens"] = tokens.roll(1, dims=1)
        return {"ntokens": tokens.numel(), "net_input": inputs, "target": tokens}

    def __call__(self, update: int = 0) -> None:
        """Take one training step as if it were the ``update``-th."""
        self.model.set_num_updates(update)
        self.criterion.num_updates = update
        self.optimiser.zero_grad()
        loss, size, _ = self.criterion(self.model, self.sample)
        (loss / size).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()


def paired_time(
    shape: Dict[str, Any], device: str, pairs: int, precision: str = "fp32"
) -> Dict[str, float]:
    """Median seconds of each variant and the median of the pairwise ratios."""
    interval = interval_for(shape["words"])
    plain = Step(shape, "plain", device, precision)
    control = Step(shape, "spectrum_control", device, precision)
    alternatives: Dict[str, Callable[[], None]] = {"plain": plain, "due": control}
    if interval > 1:
        alternatives["other"] = lambda: control(1)
    times = paired_times(alternatives, pairs)
    others = times.get("other", times["due"])
    control_times = [
        (due + (interval - 1) * other) / interval for due, other in zip(times["due"], others)
    ]
    ratios = [c / p for c, p in zip(control_times, times["plain"])]
    return {
        "plain_s": statistics.median(times["plain"]),
        "spectrum_control_s": statistics.median(control_times),
        "time_ratio": statistics.median(ratios),
        "time_ratio_min": min(ratios),
        "time_ratio_max": max(ratios),
        "interval": interval,
        "pairs": pairs,
    }


def measure_memory(name: str, variant: str, device: str, precision: str) -> float:
    """Peak MiB of three steps; to be called in a process of its own."""
    step = Step(SHAPES[name], variant, device, precision)
    for _ in range(3):
        step(0)
    return peak_mib(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["iwslt"])
    add_device_options(parser)
    parser.add_argument("--pairs", type=positive, default=5)
    parser.add_argument("--measure-memory", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure_memory:
        print(measure_memory(*args.measure_memory, args.device, args.precision))
        return
    results = {}
    for name in args.shape:
        shape = SHAPES[name]
        print(f"{name}: {shape['what']}, {args.device}, {args.precision}", flush=True)
        figures: Dict[str, Any] = paired_time(shape, args.device, args.pairs, args.precision)
        for variant in ("plain", "spectrum_control"):
            figures[f"{variant}_mib"] = in_fresh_process(
                "benchmarks.bench_step",
                ["--measure-memory", name, variant, *device_arguments(args)],
            )
        figures["memory_ratio"] = figures["spectrum_control_mib"] / figures["plain_mib"]
        figures["budget"] = shape["budget"]
        results[name] = figures
        print_table(
            [
                {
                    "": what,
                    "plain": figures[f"plain_{unit}"],
                    shape.get("method", "spectrum control"): figures[f"spectrum_control_{unit}"],
                    "ratio": figures[f"{name_of_ratio}_ratio"],
                    "budget": shape["budget"][name_of_ratio],
                }
                for what, unit, name_of_ratio in (
                    ("seconds a step", "s", "time"),
                    ("peak memory, MiB", "mib", "memory"),
                )
            ]
        )
        low, high = figures["time_ratio_min"], figures["time_ratio_max"]
        print(f"ratios of the pairs: {low:.3f} to {high:.3f}")
    print_result("step", device=args.device, precision=args.precision, results=results)


if __name__ == "__main__":
    main()
