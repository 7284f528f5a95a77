"""Whole trainings by this package against those by bare fairseq: time of an update, peak memory.

    python -m benchmarks.bench_processes
        [--shape iwslt|multi30k|wikitext103|tiny ...] [--methods likelihood spectrum_control ...]
        [--pairs 5] [--updates N] [--ours='--loss-form dense'] [--keep-freed-memory]
        [--work-dir DIR] [--peers PYTHON]

Every training is a process of its own on random words, and validates once. A turn runs plain
fairseq, without the plugin, and then each method; the next turn runs them backwards. Ratios are
formed turn by turn, from the mean time of the updates between the first and the last, on the clock
and of the processor: on a shared machine, with one thread, the latter scatters less. Finished runs
lie in DIR, and the same command goes on from there; runs with other flags, threads, torch, commit
or processor stand beside them. With ``--peers``, the Python of an environment
that has transformers, joeynmt and eole, their models take part in translation (peer_training.py).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

import torch
from fairseq.data import indexed_dataset

import spectral_fairseq
from benchmarks.bench_step import vocabulary
from benchmarks.harness import (
    KEEP_FREED_MEMORY,
    commit,
    positive,
    print_result,
    print_table,
    whole_records,
)
from spectral_fairseq.files import making_folder, replacing
from spectral_fairseq.functional.processor import processor

PACKAGE = os.path.dirname(os.path.abspath(spectral_fairseq.__file__))


class Shape(NamedTuple):
    """Sizes of a training.

    Args:
        what: for readers.
        words: entries of the dictionary.
        sentences: in a batch.
        length: of each sentence, </s> included.
        arch: of fairseq.
        flags: all others that fairseq and this package share.
        update_freq: batches in an update.
        updates: timed ones of each process.
    """

    what: str
    words: int
    sentences: int
    length: int
    arch: str
    flags: str
    update_freq: int = 1
    updates: int = 5


TRANSLATION = (
    "--task translation -s de -t en --share-all-embeddings --dropout 0.3 --label-smoothing 0.1"
)
_SIZES = "--{0}-embed-dim {1} --{0}-ffn-embed-dim {2} --{0}-layers {3} --{0}-attention-heads 4"


def _both_sides(*sizes: int) -> str:
    return " ".join(_SIZES.format(side, *sizes) for side in ("encoder", "decoder"))


SHAPES: Dict[str, Shape] = {
    "iwslt": Shape(
        "transformer_iwslt_de_en, d = 512, V = 9,992, 4,096 tokens",
        *(9_992, 128, 32, "transformer_iwslt_de_en", TRANSLATION),
    ),
    "multi30k": Shape(
        "the recipe of Multi30k: 4+4 layers, d = 128, V = 9,992, 2 x 4,096 tokens",
        *(9_992, 256, 16, "transformer_iwslt_de_en"),
        f"{TRANSLATION} {_both_sides(128, 256, 4)}",
        update_freq=2,
        updates=8,
    ),
    "wikitext103": Shape(
        "transformer_lm, 4 layers, d = 410, V = 267,735, full softmax, 1,024 tokens",
        *(267_735, 8, 128, "transformer_lm"),
        "--task language_modeling --share-decoder-input-output-embed --tokens-per-sample 128 "
        "--decoder-embed-dim 410 --decoder-input-dim 410 --decoder-output-dim 410 "
        "--decoder-ffn-embed-dim 2100 --decoder-layers 4 --decoder-attention-heads 10",
        updates=16,  # one of 16 computes the penalties on so large a table
    ),
    "tiny": Shape(
        "multi30k with 500 words, to see that the benchmark runs",
        *(500, 8, 16, "transformer_iwslt_de_en"),
        f"{TRANSLATION} {_both_sides(32, 64, 1)}",
        updates=2,
    ),
}
# Flags beside --user-dir; {arch} is that of fairseq, the others are this package's.
METHODS: Dict[str, str] = {
    "likelihood": "--arch {arch} --criterion regularized_cross_entropy",
    "spectrum_control": "--arch {sc} --criterion spectrum_control",
    "weight_norm_table": "--arch {wn} --criterion regularized_cross_entropy",
    "cosine": "--arch {arch} --criterion mle_cosreg",
}
PLAIN = "plain"
PEERS = ("marian", "joeynmt", "eole")
COMMON = (
    "--optimizer adam --adam-betas (0.9,0.98) --lr 5e-4 --lr-scheduler inverse_sqrt "
    "--warmup-updates 4000 --clip-norm 0.0 --num-workers 0 --cpu --no-save --log-interval 1000 "
    "--seed 1"
)


def write_data(folder: Path, shape: Shape) -> None:
    """Binarised random words, in a folder: a training set for all updates, a batch to validate."""
    dictionary = vocabulary(shape.words)
    translates = "translation" in shape.flags
    names = [f".de-en.{side}" for side in ("de", "en")] if translates else [""]
    for name in ("dict.de.txt", "dict.en.txt") if translates else ("dict.txt",):
        dictionary.save(str(folder / name))
    batches = {"train": (shape.updates + 2) * shape.update_freq, "valid": 1}
    generator = torch.Generator().manual_seed(2)
    for split, count in batches.items():
        size = (count * shape.sentences, shape.length)
        for name in names:
            words = torch.randint(4, shape.words, size, generator=generator)
            words[:, -1] = dictionary.eos()
            builder = indexed_dataset.make_builder(
                str(folder / f"{split}{name}.bin"), "mmap", vocab_size=shape.words
            )
            for sentence in words:
                builder.add_item(sentence)
            builder.finalize(str(folder / f"{split}{name}.idx"))


def command(shape: Shape, method: str, data: Path, ours: str) -> List[str]:
    """The training of a method, as arguments of Python."""
    flags = f"--max-tokens {shape.sentences * shape.length} --update-freq {shape.update_freq}"
    flags = f"{COMMON} {flags} --max-update {shape.updates + 2} {shape.flags}"
    if method == PLAIN:
        smoothed = "label_smoothed_cross_entropy"
        criterion = smoothed if "label-smoothing" in shape.flags else "cross_entropy"
        flags += f" --arch {shape.arch} --criterion {criterion}"
    else:
        translates = shape.arch == "transformer_iwslt_de_en"
        tables = {
            kind: f"transformer_{kind}_iwslt_de_en" if translates else f"transformer_lm_{kind}"
            for kind in ("sc", "wn")
        }
        flags += f" --user-dir {shlex.quote(PACKAGE)} {ours} "
        flags += METHODS[method].format(arch=shape.arch, **tables)
    save = data.parent / "unused"
    return [
        *(sys.executable, "-m", "benchmarks.timed_training", str(data)),
        *("--save-dir", str(save), *shlex.split(flags.replace("(0.9,0.98)", "'(0.9, 0.98)'"))),
    ]


def peer_command(python: Path, shape: Shape, peer: str) -> List[str]:
    """The training of another package's model, of the sizes of a translation shape."""
    sizes = re.findall(r"--encoder-\S+ (\d+)", shape.flags)  # in the order of _SIZES
    dim, ffn, layers, heads = sizes or (512, 1024, 6, 4)  # transformer_iwslt_de_en
    numbers = {
        "words": shape.words,
        "sentences": shape.sentences,
        "length": shape.length,
        "dim": dim,
        "ffn": ffn,
        "layers": layers,
        "heads": heads,
        "update-freq": shape.update_freq,
        "updates": shape.updates,
    }
    script = str(Path(__file__).with_name("peer_training.py"))
    flags = (f"--{name}={number}" for name, number in numbers.items())
    return [str(python), script, peer, *flags]


def conditions(args: argparse.Namespace) -> Dict[str, Any]:
    """What a run shares with those that it is compared with, beside its shape."""
    return {
        "ours": args.ours,
        "kept": args.keep_freed_memory,
        "commit": commit(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "processor": processor().name,
    }


def measure(arguments: List[str], keep_freed_memory: bool) -> Dict[str, Any]:
    """Run a training; its seconds and MiB."""
    environment = {**os.environ, **(KEEP_FREED_MEMORY if keep_freed_memory else {})}
    done = subprocess.run(
        arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    last = (done.stdout.splitlines() or [""])[-1]
    if done.returncode or not last.startswith("{"):
        raise SystemExit(f"{shlex.join(arguments)}\n{done.stdout}")
    found = json.loads(last)
    # From the beginning of one update to that of the next: data, logging and all. The first is
    # left out, and the last has no next one.
    begun = found["begun"][1:]
    passed = [[b - a for a, b in zip(*both)] for both in zip(begun, begun[1:])]
    seconds, processor_seconds = map(list, zip(*passed))
    return {"seconds": seconds, "processor_seconds": processor_seconds, "mib": found["mib"]}


def _listed(found: Any) -> List[float]:
    return found if isinstance(found, list) else [found]


def summary(runs: List[Dict[str, Any]], methods: List[str]) -> List[Dict[str, Any]]:
    """Median and range, over the turns, of each method's time and memory over plain's."""
    rows = []
    of = {(run["method"], run["turn"]): run for run in runs}
    turns = sorted({turn for method, turn in of if method == PLAIN})
    for method in (PLAIN, *methods):
        mine = [(of[method, turn], of[PLAIN, turn]) for turn in turns if (method, turn) in of]
        row: Dict[str, Any] = {"method": method, "turns": len(mine)}
        for key in ("seconds", "processor_seconds", "mib"):
            values = [[statistics.mean(_listed(run[key])) for run in pair] for pair in mine]
            ratios = [value / plain for value, plain in values]
            row[key] = statistics.median(value for value, _ in values)
            row[f"{key}_ratio"] = statistics.median(ratios)
            row[f"{key}_range"] = f"{min(ratios):.3f} to {max(ratios):.3f}"
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES)[:3])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--pairs", type=positive, default=5)
    parser.add_argument("--updates", type=positive, help="timed ones of each process")
    parser.add_argument("--ours", default="", help="more flags of this package's methods")
    parser.add_argument("--keep-freed-memory", action="store_true", help="docs/speed.md")
    parser.add_argument("--peers", type=Path, metavar="PYTHON")
    parser.add_argument("--work-dir", type=Path, default=Path("build/bench_processes"))
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    results, what = {}, conditions(args)
    for name in args.shape:
        shape = SHAPES[name]
        peers = PEERS if args.peers and shape.arch == "transformer_iwslt_de_en" else ()
        shape = shape._replace(updates=args.updates or shape.updates)
        folder = args.work_dir.absolute() / f"{name}-{shape.updates}"
        if not folder.exists():
            with making_folder(folder) as partial:
                write_data(partial, shape)
        log = args.work_dir / f"{name}-{shape.updates}.jsonl"
        recorded = whole_records(log)
        with replacing(log) as whole:  # without half a line, which a killed run may have left
            whole.write_text("".join(f"{json.dumps(run)}\n" for run in recorded), "utf-8")
        runs = [run for run in recorded if all(run.get(key) == what[key] for key in what)]
        done = {(run["method"], run["turn"]) for run in runs}
        print(f"{name}: {shape.what}; {shape.updates} updates a process", flush=True)
        for turn in range(args.pairs):
            order = [PLAIN, *args.methods, *peers]
            for method in order if turn % 2 == 0 else order[::-1]:
                if (method, turn) in done:
                    continue
                if method in peers:
                    argv = peer_command(args.peers, shape, method)
                else:
                    argv = command(shape, method, folder, args.ours)
                found = measure(argv, args.keep_freed_memory)
                runs.append({"method": method, "turn": turn, **what, **found})
                with open(log, "a", encoding="utf-8") as file:
                    file.write(f"{json.dumps(runs[-1])}\n")
        results[name] = summary(runs, [*args.methods, *peers])
        print_table(
            [
                {
                    "method": row["method"],
                    "turns": row["turns"],
                    **{
                        key: f"{row[key]:.4g}; {row[f'{key}_ratio']:.3f} ({row[f'{key}_range']})"
                        for key in ("seconds", "processor_seconds", "mib")
                    },
                }
                for row in results[name]
            ]
        )
    print_result("processes", **what, results=results)


if __name__ == "__main__":
    main()
