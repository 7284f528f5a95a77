"""The two recipes, which differ in two flags, as fairseq command lines; and how to read their logs.

Both are given ``--user-dir``, so that the mends of the host serve both alike.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import spectral_fairseq
from settings import Settings
from spectral_fairseq.errors import DataError

# recipe -> (label, the flags in which it differs)
RECIPES: Dict[str, Tuple[str, Tuple[str, ...]]] = {
    "plain": (
        "plain",
        ("--arch", "transformer", "--criterion", "label_smoothed_cross_entropy"),
    ),
    "spectrum_control": (
        "spectrum control",
        ("--arch", "transformer_sc", "--criterion", "spectrum_control"),
    ),
}

USER_DIR = str(Path(spectral_fairseq.__file__).resolve().parent)


def preprocess_command(source: str, target: str, text: Path, binary: Path) -> List[str]:
    """``fairseq-preprocess`` with one dictionary for both languages."""
    return [
        "fairseq-preprocess",
        "--source-lang",
        source,
        "--target-lang",
        target,
        "--trainpref",
        f"{text}/train",
        "--validpref",
        f"{text}/valid",
        "--testpref",
        f"{text}/test",
        "--joined-dictionary",
        "--destdir",
        str(binary),
        "--workers",
        "2",
    ]


def train_command(
    recipe: str, s: Settings, source: str, target: str, binary: Path, checkpoints: Path
) -> List[str]:
    """``fairseq-train`` for one recipe; it goes on from ``checkpoint_last.pt`` if there is one."""
    command = [
        "fairseq-train",
        str(binary),
        "--user-dir",
        USER_DIR,
        *RECIPES[recipe][1],
        "--source-lang",
        source,
        "--target-lang",
        target,
        "--share-all-embeddings",
        "--label-smoothing",
        str(s.label_smoothing),
        "--dropout",
        str(s.dropout),
    ]
    for side in ("encoder", "decoder"):
        command += [
            f"--{side}-embed-dim",
            str(s.dim),
            f"--{side}-ffn-embed-dim",
            str(s.ffn_dim),
            f"--{side}-layers",
            str(s.layers),
            f"--{side}-attention-heads",
            str(s.attention_heads),
        ]
    command += [
        "--optimizer",
        "adam",
        "--adam-betas",
        "(0.9, 0.98)",
        "--lr",
        str(s.learning_rate),
        "--lr-scheduler",
        "inverse_sqrt",
        "--warmup-updates",
        str(s.warmup_updates),
        "--clip-norm",
        str(s.clip_norm),
        "--max-tokens",
        str(s.max_tokens),
        "--max-update",
        str(s.updates),
        "--seed",
        str(s.seed),
        "--save-dir",
        str(checkpoints),
        # An interruption costs at most 200 updates; fairseq validates whenever it saves.
        "--no-epoch-checkpoints",
        "--save-interval-updates",
        "200",
        "--keep-interval-updates",
        "1",
        "--num-workers",
        "0",
        "--log-format",
        "json",
        "--log-interval",
        "10",
        "--distributed-world-size",
        "1",
    ]
    return command + (["--cpu"] if s.device == "cpu" else [])


def generate_command(
    s: Settings, source: str, target: str, binary: Path, checkpoint: Path
) -> List[str]:
    """``fairseq-generate`` on the test split, subwords joined again."""
    command = [
        "fairseq-generate",
        str(binary),
        "--user-dir",
        USER_DIR,
        "--path",
        str(checkpoint),
        "--source-lang",
        source,
        "--target-lang",
        target,
        "--gen-subset",
        "test",
        "--beam",
        str(s.beam),
        "--batch-size",
        "32",
        "--remove-bpe",
        "sentencepiece",
        "--num-workers",
        "0",
        "--distributed-world-size",
        "1",
    ]
    return command + (["--cpu"] if s.device == "cpu" else [])


_RECORD = re.compile(r"\| INFO \| (train_inner|train|valid) \| (\{.*\})\s*$")


def log_record(line: str) -> Optional[Tuple[str, Dict[str, Any]]]:
    """(kind, figures) of a line of ``--log-format json``; None for any other line."""
    match = _RECORD.search(line)
    return (match.group(1), json.loads(match.group(2))) if match else None


class TrainingProgress:
    """Updates done, and the latest perplexities, from training's output."""

    def __init__(self) -> None:
        self.updates, self.ppl, self.valid_ppl = 0, "", ""

    def __call__(self, line: str) -> Optional[Tuple[int, str]]:
        """See :data:`jobs.Progress`."""
        record = log_record(line)
        if record is None:
            return None
        kind, figures = record
        if kind == "train_inner":
            self.updates, self.ppl = int(figures["num_updates"]), f"ppl {figures['ppl']}"
        elif kind == "valid":
            self.valid_ppl = f", valid ppl {figures['valid_ppl']}"
        return self.updates, self.ppl + self.valid_ppl


class TranslationProgress:
    """Sentences translated, from fairseq-generate's output."""

    def __init__(self) -> None:
        self.sentences = 0

    def __call__(self, line: str) -> Optional[Tuple[int, str]]:
        """See :data:`jobs.Progress`."""
        if not line.startswith("D-"):
            return None
        self.sentences += 1
        return self.sentences, ""


def read_training_log(path: Path) -> Dict[str, Any]:
    """Figures of a training, over all its interruptions.

    Returns:
        ``valid_ppl`` of the best checkpoint and the update at which it was reached,
        ``seconds_per_update`` (median over intervals of ten updates, waiting for data included),
        ``updates``, and ``gpu_free_gb`` where there was a GPU.

    Raises:
        DataError: the log has no training or no validation in it.
    """
    records = [log_record(line) for line in path.read_text("utf-8", "replace").split("\n")]
    steps = [figures for kind, figures in filter(None, records) if kind == "train_inner"]
    valid = [figures for kind, figures in filter(None, records) if kind == "valid"]
    rates = sorted(float(step["ups"]) for step in steps if float(step.get("ups", 0)) > 0)
    if not rates or not valid:
        raise DataError(
            f"a training's log in {path}",
            f"{len(rates)} timed intervals, {len(valid)} validations",
            "Remove the work folder, or give another --work-dir, and train anew.",
        )
    best = min(valid, key=lambda figures: float(figures["valid_loss"]))
    result = {
        "valid_ppl": round(2 ** float(best["valid_nll_loss"]), 3),
        "best_update": int(best["valid_num_updates"]),
        "updates": int(valid[-1]["valid_num_updates"]),
        "seconds_per_update": round(1 / rates[len(rates) // 2], 4),
    }
    free = [float(step["gb_free"]) for step in steps if "gb_free" in step]
    return {**result, "gpu_free_gb": min(free)} if free else result


def read_translations(path: Path, count: int) -> List[str]:
    """The detokenised best hypotheses in the order of the test set.

    Raises:
        DataError: not one for each of the ``count`` sentences.
    """
    found: Dict[int, str] = {}
    for line in path.read_text("utf-8", "replace").split("\n"):
        if line.startswith("D-"):
            name, _, text = line.split("\t")
            found[int(name[2:])] = text
    if sorted(found) != list(range(count)):
        raise DataError(
            f"{count} translations in {path}",
            f"{len(found)}",
            "Run `spectral-fairseq doctor` to see what became of the host's known defects.",
        )
    return [found[index] for index in range(count)]
