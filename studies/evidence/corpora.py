"""The data of a study: text, subwords and fairseq's binary data in its work folder."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple

from spectral_fairseq.errors import DataError
from studies import corpus, own_text
from studies.evidence.plan import Cell
from studies.training_data import OPENDOCS, language_model_data, other_test_data, translation_data

SPLITS = ("train", "valid", "test")


class EvaluationSet(NamedTuple):
    """Text that a model translates.

    Attributes:
        name: in logs and records.
        binary: fairseq's data folder.
        split: its name there.
        text: path of the text without the ending of a language.
    """

    name: str
    binary: Path
    split: str
    text: Path

    def lines(self, language: str) -> List[str]:
        """The text in one language."""
        return corpus.read_lines(self.text.with_name(f"{self.text.name}.{language}"))


def other_tests(folder: Path) -> Dict[str, Path]:
    """The test sets ``NAME.de`` and ``NAME.en`` of a folder: name -> path without the ending.

    Raises:
        DataError: there are none, a name cannot be used, a file is missing, or the two languages of
            a test set differ in their number of lines.
    """
    found = {path.stem: path.with_suffix("") for path in sorted(folder.glob("*.de"))}
    if not found:
        raise DataError(f"NAME.de and NAME.en in {folder}", "no *.de", "Check --other-tests.")
    for name, path in found.items():
        if name in SPLITS or "," in name:
            raise DataError(
                f"names without a comma, other than {', '.join(SPLITS)}",
                f"{path}.de",
                "Rename the test set.",
            )
        if not path.with_name(f"{name}.en").exists():
            raise DataError(f"{path}.en beside {path}.de", "no such file", "Check --other-tests.")
        german, english = (corpus.read_lines(path.with_name(f"{name}.{x}")) for x in ("de", "en"))
        if len(german) != len(english) or not german:
            raise DataError(
                f"as many lines in {path}.de as in {path}.en, and at least one",
                f"{len(german)} and {len(english)}",
                "Check --other-tests.",
            )
    return found


@dataclass(frozen=True)
class TranslationCorpus:
    """Parallel text; each number of subwords has a folder of its own.

    Args:
        root: folder that receives them.
        pairs: of the training split.
        source: see :func:`studies.training_data.translation_data`.
        others: more test sets, see :func:`other_tests`.
    """

    root: Path
    pairs: int = 10_000
    source: Path = OPENDOCS
    others: Mapping[str, Path] = field(default_factory=dict)

    def settings(self) -> Dict[str, Any]:
        """What tells this text from another."""
        return {"corpus": corpus.load_manifest(self.source)["sha256"], "pairs": self.pairs}

    def prepare(self, cell: Cell) -> Path:
        """Make the binary data of a training, unless they are there; returns their folder."""
        return self._made(cell) / "translation"

    def set(self, cell: Cell, split: str) -> EvaluationSet:
        """A split of the corpus."""
        folder = self._made(cell)
        return EvaluationSet(split, folder / "translation", split, folder / "text" / split)

    def other_sets(self, cell: Cell) -> List[EvaluationSet]:
        """The other test sets."""
        if not self.others:
            return []
        folder, name = self._made(cell), f"other-{self._digest()[:8]}"
        other_test_data(folder, name, self.others)
        binary, text = folder / name / "translation", folder / name / "text"
        return [
            EvaluationSet(test, binary, f"test{index or ''}", text / test)
            for index, test in enumerate(self.others)
        ]

    def _digest(self) -> str:
        found = hashlib.sha256()
        for name, path in self.others.items():
            for language in ("de", "en"):
                text = path.with_name(f"{path.name}.{language}").read_bytes()
                found.update(f"{name}.{language} {len(text)} ".encode() + text)
        return found.hexdigest()

    def _made(self, cell: Cell) -> Path:
        subwords = int(dict(cell.recipe)["subwords"])
        folder = self.root / f"subwords-{subwords}"
        translation_data(
            folder, pairs=self.pairs, subwords=subwords, splits=SPLITS, source=self.source
        )
        return folder


_VALID_WORDS = 60_000


@dataclass(frozen=True)
class LanguageModelCorpus:
    """The end of the training text, and the beginning of the validation text, which follows it.

    Args:
        root: folder that receives the data.
        source: folder with ``train.tokens`` and so on, made by examples/lm_sotu/sotu.py.
        words: about how many words of the training text are kept.
    """

    root: Path
    source: Path
    words: int

    def settings(self) -> Dict[str, Any]:
        """What tells this text from another."""
        return {"corpus": own_text.checksum(self.source), "tokens": self._tokens()}

    def prepare(self, _cell: Cell) -> Path:
        """Make the binary data, unless they are there; returns their folder."""
        limit = ("--thresholdsrc", "3")
        language_model_data(self.root, self.source, *limit, splits=SPLITS, tokens=self._tokens())
        return self.root / "language_model"

    def _tokens(self) -> Dict[str, int]:
        return {"train": self.words, "valid": _VALID_WORDS}
