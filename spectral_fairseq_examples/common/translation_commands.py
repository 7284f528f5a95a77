"""fairseq's commands for a translation recipe, and the reading of what fairseq-generate prints.

Every command gets ``--user-dir``, so that fairseq is patched alike for all recipes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

import spectral_fairseq
from spectral_fairseq.errors import DataError
from spectral_fairseq_examples.common.translation_settings import TranslationSettings

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
    flags: Sequence[str],
    s: TranslationSettings,
    source: str,
    target: str,
    binary: Path,
    checkpoints: Path,
) -> List[str]:
    """``fairseq-train`` for one recipe, which continues from ``checkpoint_last.pt`` if it exists.

    Args:
        flags: the flags in which recipes differ; they override the others.
        s: everything else.
        source: source language, which is the ending of its text files.
        target: target language.
        binary: fairseq's data folder.
        checkpoints: folder to save in.
    """
    command = [
        "fairseq-train",
        str(binary),
        "--user-dir",
        USER_DIR,
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
    # The last of two flags holds, so that a recipe can change what is common to all.
    return [*command, *flags] + (["--cpu"] if s.device == "cpu" else [])


def generate_command(
    s: TranslationSettings, source: str, target: str, binary: Path, checkpoint: Path
) -> List[str]:
    """``fairseq-generate`` on the test split, which joins the subwords again."""
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


class TranslationProgress:
    """Progress of fairseq-generate: the number of translated sentences."""

    def __init__(self) -> None:
        self.sentences = 0

    def __call__(self, line: str) -> Optional[Tuple[int, str]]:
        """See :data:`jobs.Progress`."""
        if not line.startswith("D-"):
            return None
        self.sentences += 1
        return self.sentences, ""


def read_translations(path: Path, count: int) -> List[str]:
    """Detokenised best hypotheses in the order of the test set.

    Raises:
        DataError: there are not ``count`` of them.
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
            "Run `spectral-fairseq doctor` to check that fairseq's known defects are patched.",
        )
    return [found[index] for index in range(count)]
