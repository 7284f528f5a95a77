"""A prepared corpus and a training on it: the parts of every translation example here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Sequence

from spectral_fairseq_examples.common import corpus, measures
from spectral_fairseq_examples.common.jobs import Job, no_progress
from spectral_fairseq_examples.common.machine import gpu_bytes
from spectral_fairseq_examples.common.training import TrainingRun
from spectral_fairseq_examples.common.translation_commands import (
    TranslationProgress,
    generate_command,
    preprocess_command,
    read_translations,
    train_command,
)
from spectral_fairseq_examples.common.translation_settings import TranslationSettings
from spectral_fairseq_examples.common.workdir import WorkDir, write_text
from spectral_fairseq_examples.common.workers import Workers

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
        """Write text and subwords, unless that was done before."""
        work = self.work
        work.step("unpack", lambda: corpus.unpack(self.folder, self.text))
        work.step(
            "learn_subwords", lambda: corpus.learn_subwords(self.text, self.model, self.vocabulary)
        )
        work.step("encode", lambda: corpus.encode(self.text, self.model, self.subwords))

    def binarise(self, workers: Workers) -> None:
        """Write fairseq's binary data, unless that was done before."""

        def preprocess() -> Dict[str, Any]:
            corpus.clear(self.binary)
            log = self.work.root / "preprocess.log"
            workers.run([Job("preprocess", self.preprocess, log, 1, " step", no_progress)])
            return {}

        self.work.step("preprocess", preprocess)

    def references(self) -> List[str]:
        """Reference translations of the test set."""
        return corpus.read_lines(self.text / f"test.{self.target}")


class TranslationRun(TrainingRun):
    """One training with one recipe, in a folder of its own.

    Args:
        label: the text beside its bar.
        flags: the part of the command in which recipes differ.
        settings: everything else.
        data: the corpus.
        folder: a folder below the corpus's work folder; receives ``train.log``, ``checkpoints/``,
            ``translate.log``, ``analyze.log`` and ``test.*``.
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
            label,
            data.work,
            folder,
            command,
            data.binary,
            settings.updates,
            settings.updates,
            flags,
        )
        self.settings, self.data = settings, data
        self.translate_command = generate_command(settings, *languages, data.binary, self.best)

    def translation(self) -> Job:
        """The job that translates the test set with the best checkpoint."""
        log = self.folder / "translate.log"
        if log.exists():
            log.unlink()  # left by an interrupted run
        return Job(
            self.label,
            self.translate_command,
            log,
            self.data.test_pairs,
            " sentences",
            TranslationProgress(),
        )

    def hypotheses(self) -> List[str]:
        """Translations in the order of the test set, which are also written into ``test.*``."""
        lines = read_translations(self.folder / "translate.log", self.data.test_pairs)
        path = self.folder / f"test.{self.data.target}"
        write_text(path, "".join(f"{line}\n" for line in lines))
        return lines

    def figures(self) -> Dict[str, Any]:
        """Scores and the figures of the training and of the table."""
        figures = super().figures()
        if self.settings.device == "cuda":
            figures["peak_bytes"] = gpu_bytes() - int(figures["gpu_free_gb"] * 2**30)
        return {**measures.scores(self.hypotheses(), self.data.references()), **figures}
