"""Train a small GPT-2 from scratch with transformers.Trainer: plain, and with two methods."""

from __future__ import annotations

import argparse
import collections
import io
import math
import re
import sys
import tarfile
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "examples" / "data" / "opendocs_de_en" / "opendocs-libreoffice-de-en.tar.xz"
METHODS = ("plain", "weight-norm start", "control")
FIGURES = (
    *("mean_cosine", "mean_share", "isoscore", "effective_rank"),
    *("sigma_over_edge_centred", "effective_rank_centred"),
)
UNKNOWN, END = "<unk>", "<end>"


def parse_arguments(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """The command line; see README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, help="any text file; its last twentieth is the test")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--steps", type=int, default=200, help="updates of each training")
    parser.add_argument("--words", type=int, default=8000, help="size of the vocabulary")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("outputs/causal_lm_transformers"))
    return parser.parse_args(argv)


def read_text(path: Optional[Path]) -> Tuple[List[str], List[str]]:
    """Lines to train on and lines of the test."""
    if path is None:
        with tarfile.open(CORPUS, "r:xz") as archive:
            files = [archive.extractfile(f"{name}.en") for name in ("train", "test")]
            parts = [io.TextIOWrapper(file, "utf-8").readlines() for file in files if file]
            return parts[0], parts[1]
    lines = path.read_text("utf-8").splitlines()
    test = max(1, len(lines) // 20)
    return lines[:-test], lines[-test:]


def words_of(lines: Sequence[str]) -> List[str]:
    """Words and marks, with an end after each line."""
    return [word for line in lines for word in [*re.findall(r"\w+|[^\w\s]", line), END]]


def perplexity(trainer, test) -> float:
    """Of the words of the test, in blocks."""
    return math.exp(trainer.evaluate(test)["eval_loss"])


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Train, test, measure and save each method; returns 0 if the saved models are plain ones."""
    arguments = parse_arguments(argv)
    import torch

    from spectral_fairseq.analysis import analyze
    from spectral_fairseq.provenance import import_transformers
    from spectral_fairseq.training import SpectrumControl, fused_loss_, weight_norm_
    from spectral_fairseq.training.callbacks import SpectralTrainerCallback

    transformers = import_transformers()  # also beside a torchaudio of another build of torch
    train, test = map(words_of, read_text(arguments.text))
    frequent = collections.Counter(train).most_common(arguments.words - 1)
    vocabulary = {word: row for row, word in enumerate([UNKNOWN, *(word for word, _ in frequent)])}
    coded = [torch.tensor([vocabulary.get(word, 0) for word in part]) for part in (train, test)]
    counts = torch.bincount(coded[0], minlength=len(vocabulary)).tolist()
    blocks = []
    for part in coded:
        rows = part[: len(part) // 64 * 64].view(-1, 64)
        blocks.append([{"input_ids": row, "labels": row} for row in rows])
    print(f"{len(train)} words to train on, {len(test)} of the test, a table of {len(vocabulary)}")

    found: Dict[str, Dict[str, float]] = {}
    unequal = 0.0
    for method in arguments.methods:
        folder = arguments.out / method.replace(" ", "-")
        torch.manual_seed(arguments.seed)
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=len(vocabulary),
                n_positions=64,
                n_embd=arguments.width,
                n_layer=arguments.layers,
                n_head=4,
                bos_token_id=vocabulary[END],
                eos_token_id=vocabulary[END],
            )
        )
        if method == "weight-norm start":
            weight_norm_(model, counts, sigma=0.1)
        control = SpectrumControl(model) if method == "control" else None
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(
                str(folder / "trainer"),
                max_steps=arguments.steps,
                per_device_train_batch_size=16,
                learning_rate=arguments.learning_rate,
                weight_decay=arguments.weight_decay,
                warmup_steps=arguments.steps // 10,
                logging_steps=max(1, arguments.steps // 6),
                save_strategy="no",
                report_to=[],
                seed=arguments.seed,
                use_cpu=not torch.cuda.is_available(),
                dataloader_pin_memory=False,
            ),
            train_dataset=blocks[0],
            compute_loss_func=fused_loss_(model),
        )
        trainer.add_callback(SpectralTrainerCallback(trainer, control, plain_at_end=True))
        trainer.train()
        trainer.compute_loss_func = None  # the model is plain now, and has a loss of its own
        trainer.save_model(str(folder / "model"))

        # The saved model is one that transformers alone loads and computes alike.
        ids = torch.stack([block["input_ids"] for block in blocks[1][:4]])
        loaded = transformers.GPT2LMHeadModel.from_pretrained(folder / "model").eval()
        with torch.no_grad():
            logits = [one.eval().cpu()(ids).logits for one in (model, loaded)]
        unequal = max(unequal, float((logits[0] - logits[1]).abs().max()))
        measures = analyze(folder / "model", counts=counts).scalars()
        found[method] = {"perplexity": perplexity(trainer, blocks[1])}
        found[method].update((name, measures[name]) for name in FIGURES)

    width = max(map(len, ("perplexity", *FIGURES)))
    print("\n" + " " * width, *(f"{method:>18}" for method in found))
    for name in ("perplexity", *FIGURES):
        print(f"{name:{width}}", *(f"{figures[name]:18.4g}" for figures in found.values()))
    print(f"The logits of the saved models differ by {unequal:.1e} at most.")
    return int(unequal > 1e-5)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # of this source tree
    sys.exit(main())
