"""A corpus made ready, and trainings on it: what every translation example here consists of."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Sequence

import corpus
import measures
from fairseq_log import read_training_log
from jobs import Job
from machine import gpu_bytes
from settings import TranslationSettings
from training import TrainingRun
from translation import (
    TranslationProgress,
    generate_command,
    preprocess_command,
    read_translations,
    train_command,
)
from workdir import WorkDir, write_text
from workers import Workers

PREPARATION = ("unpack", "learn_subwords", "encode", "preprocess")


class PreparedCorpus:
    """A corpus as text, as subwords and as fairseq's binary data, in a work folder.

    Args:
        folder: see :func:`corpus.load_manifest`.
        work: receives ``text/``, ``subwords/`` and ``binary/``.
        vocabulary: number of subwords.
    """

    def __init__(self, folder: Path, work: WorkDir, vocabulary: int) -> None:
        manifest = corpus.load_manifest(folder)
        self.folder, self.work, self.vocabulary = folder, work, vocabulary
        self.source, self.target = manifest["source_language"], manifest["target_language"]
        self.test_pairs: int = manifest["splits"]["test"]["pairs"]
        self.text, self.subwords = work.root / "text", work.root / "subwords"
        self.model, self.binary = work.root / "subwords.model", work.root / "binary"
        self.preprocess = preprocess_command(self.source, self.target, self.subwords, self.binary)

    def encode(self) -> None:
        """Text and subwords, unless they were made before."""
        work = self.work
        work.step("unpack", lambda: corpus.unpack(self.folder, self.text))
        work.step(
            "learn_subwords", lambda: corpus.learn_subwords(self.text, self.model, self.vocabulary)
        )
        work.step("encode", lambda: corpus.encode(self.text, self.model, self.subwords))

    def binarise(self, workers: Workers) -> None:
        """fairseq's binary data, unless it was made before."""

        def preprocess() -> Dict[str, Any]:
            corpus.clear(self.binary)
            log = self.work.root / "preprocess.log"
            workers.run([Job("preprocess", self.preprocess, log, 1, " step", lambda line: None)])
            return {}

        self.work.step("preprocess", preprocess)

    def references(self) -> List[str]:
        """The target side of the test set."""
        return corpus.read_lines(self.text / f"test.{self.target}")


class TranslationRun(TrainingRun):
    """One training with one recipe, in a folder of its own.

    Args:
        label: shown beside its bar.
        flags: in which its recipe differs from the others.
        settings: what it shares with them.
        data: the corpus.
        folder: receives ``train.log``, ``checkpoints/``, ``translate.log`` and ``test.*``; below
            the corpus's work folder.
    """

    def __init__(
        self,
        label: str,
        flags: Sequence[str],
        settings: TranslationSettings,
        data: PreparedCorpus,
        folder: Path,
    ) -> None:
        languages = (data.source, data.target)
        command = train_command(flags, settings, *languages, data.binary, folder / "checkpoints")
        super().__init__(
            label, data.work, folder, command, settings.updates, settings.updates, flags
        )
        self.settings, self.data = settings, data
        self.translate_command = generate_command(settings, *languages, data.binary, self.best)

    def translation(self) -> Job:
        """The job that translates the test set with the best checkpoint."""
        log = self.folder / "translate.log"
        if log.exists():
            log.unlink()  # of an interrupted run
        return Job(
            self.label,
            self.translate_command,
            log,
            self.data.test_pairs,
            " sentences",
            TranslationProgress(),
        )

    def hypotheses(self) -> List[str]:
        """The translations, in the order of the test set, kept as ``test.*`` too."""
        lines = read_translations(self.folder / "translate.log", self.data.test_pairs)
        path = self.folder / f"test.{self.data.target}"
        write_text(path, "".join(f"{line}\n" for line in lines))
        return lines

    def figures(self, gpu: bool) -> Dict[str, Any]:
        """Scores, what training took, and measures of the table."""
        training = read_training_log(self.folder / "train.log")
        peak = self.peak_figure()
        if gpu:
            peak = {"peak_bytes": gpu_bytes() - int(training["gpu_free_gb"] * 2**30)}
        return {
            **measures.scores(self.hypotheses(), self.data.references()),
            **training,
            **peak,
            **measures.table_figures(self.best, self.data.binary),
        }
