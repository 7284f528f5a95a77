"""A prepared corpus and a training on it: the parts of every translation example here.

fairseq's commands for a translation recipe, and the reading of what fairseq-generate prints.

Every command gets ``--user-dir``, so that fairseq is patched alike for all recipes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import spectral_fairseq
from spectral_fairseq.errors import DataError
from studies import corpus, training
from studies.machine import gpu_bytes
from studies.running import Job, no_progress
from studies.training import TrainingRun
from studies.work_folder import WorkDir, write_text
from studies.workers import Workers


@dataclass(frozen=True)
class TranslationSettings:
    """Everything besides a recipe's own flags that determines a result.

    A work folder holds the results of one such setting.
    """

    seed: int
    updates: int
    device: str
    corpus: str
    vocabulary: int = 6000
    dim: int = 128
    ffn_dim: int = 256
    layers: int = 2
    attention_heads: int = 4
    dropout: float = 0.1
    label_smoothing: float = 0.1
    learning_rate: float = 2e-3
    warmup_updates: int = 200
    clip_norm: float = 1.0
    max_tokens: int = 1600
    beam: int = 5
    # A translation has at most as many subwords as its source and so many more. Models that have
    # learned little repeat themselves up to fairseq's own limit, 200 subwords.
    surplus: Optional[int] = None

    def checkpoint_bytes(self) -> int:
        """About what the checkpoints of a training take: two, and one that is being written."""
        layer = 12 * self.dim**2 + 4 * self.dim * self.ffn_dim  # of the encoder and the decoder
        parameters = self.vocabulary * self.dim + self.layers * layer
        return 40 * parameters  # three times a parameter and Adam's two moments, in float32


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
    command += [] if s.surplus is None else length_limit(s.surplus)
    return command + (["--cpu"] if s.device == "cpu" else [])


def length_limit(surplus: int) -> List[str]:
    """Flags of a search whose hypotheses are at most so much longer than their sources."""
    return ["--max-len-a", "1", "--max-len-b", str(surplus)]


class TranslationProgress:
    """Progress of fairseq-generate: the number of translated sentences."""

    def __init__(self) -> None:
        self.sentences = 0

    def __call__(self, line: str) -> Optional[Tuple[int, str]]:
        """See :data:`studies.running.Progress`."""
        if not line.startswith("S-"):  # one a sentence, however many translations follow
            return None
        self.sentences += 1
        return self.sentences, ""


def read_translations(path: Path, count: int, length_penalty: float = 1.0) -> List[str]:
    """Detokenised best hypotheses in the order of the test set.

    Args:
        path: what fairseq-generate printed.
        count: sentences of the test set.
        length_penalty: of ``--nbest`` hypotheses the one whose log-probability, divided by this
            power of its length, is largest. fairseq's beam search ends at the same hypotheses
            whatever ``--lenpen`` is, so this is what it would have chosen.

    Raises:
        DataError: there are not ``count`` of them.
    """
    found: Dict[int, str] = {}
    best: Dict[int, float] = {}
    text = ""
    for line in path.read_text("utf-8", "replace").split("\n"):
        if line.startswith("D-"):
            _, _, text = line.split("\t")
        elif line.startswith("P-"):  # the log-probability of each token of the text before
            name, numbers = line.split("\t")
            scores = [float(number) for number in numbers.split()]
            index, score = int(name[2:]), sum(scores) / len(scores) ** length_penalty
            if index not in best or score > best[index]:
                found[index], best[index] = text, score
    if sorted(found) != list(range(count)):
        raise DataError(
            f"{count} translations in {path}",
            f"{len(found)}",
            "Run `spectral-fairseq doctor` to check that fairseq's known defects are patched.",
        )
    return [found[index] for index in range(count)]


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
        return {**training.scores(self.hypotheses(), self.data.references()), **figures}
