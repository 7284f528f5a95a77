"""The data of a study: text, subwords and fairseq's binary data in its work folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping

from benchmarks.corpora import OPENDOCS, language_model_data, translation_data
from benchmarks.evidence.plan import Cell
from spectral_fairseq_examples.common import corpus
from spectral_fairseq_examples.lm_sotu import own_text

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class TranslationCorpus:
    """Parallel text; each number of subwords has a folder of its own.

    Args:
        root: folder that receives them.
        pairs: of the training split.
        source: see :func:`benchmarks.corpora.translation_data`.
    """

    root: Path
    pairs: int = 10_000
    source: Path = OPENDOCS

    def settings(self) -> Dict[str, Any]:
        """What tells this text from another."""
        return {"corpus": corpus.load_manifest(self.source)["sha256"], "pairs": self.pairs}

    def prepare(self, cell: Cell) -> Path:
        """Make the binary data of a training, unless they are there; returns their folder."""
        return self._made(cell) / "translation"

    def lines(self, cell: Cell, name: str) -> List[str]:
        """The text of ``train.en``, ``test.de`` and so on."""
        return corpus.read_lines(self._made(cell) / "text" / name)

    def _made(self, cell: Cell) -> Path:
        subwords = int(dict(cell.recipe)["subwords"])
        folder = self.root / f"subwords-{subwords}"
        translation_data(
            folder, pairs=self.pairs, subwords=subwords, splits=SPLITS, source=self.source
        )
        return folder


# On two cores a language model cannot be trained to its end on all 1.8 million words.
LANGUAGE_MODEL_TOKENS = {"train": 450_000, "valid": 60_000}


@dataclass(frozen=True)
class LanguageModelCorpus:
    """The end of the training text, and the beginning of the validation text, which follows it.

    Args:
        root: folder that receives the data.
        source: folder with ``train.tokens`` and so on, made by examples/lm_sotu/sotu.py.
        tokens: about how many words of a split are kept.
    """

    root: Path
    source: Path
    tokens: Mapping[str, int]

    def settings(self) -> Dict[str, Any]:
        """What tells this text from another."""
        return {"corpus": own_text.checksum(self.source), "tokens": dict(self.tokens)}

    def prepare(self, _cell: Cell) -> Path:
        """Make the binary data, unless they are there; returns their folder."""
        limit = ("--thresholdsrc", "3")
        language_model_data(self.root, self.source, *limit, splits=SPLITS, tokens=self.tokens)
        return self.root / "language_model"
