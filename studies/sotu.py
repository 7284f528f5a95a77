"""Train an AWD-LSTM on real text, fine-tune it, and evaluate it as the papers do.

Prepares the corpus, trains with SGD, fine-tunes with averaged SGD, and measures perplexity on
valid and test: plain, with a continuous cache, with dynamic evaluation, the numbers of both
searched on valid. Finished steps are not repeated: after an interruption, give the same command.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple, Type

from spectral_fairseq.errors import ConfigurationError
from studies import own_text, sotu_corpus, tables, training
from studies.language_models import (
    LanguageModelRun,
    LanguageModelSettings,
    PreparedText,
    add_corpus,
)
from studies.machine import available_cores, check_installation, device
from studies.running import Job, Usage, exit_status
from studies.text_tables import text_table
from studies.training import train_all
from studies.work_folder import WorkDir, write_json, write_text
from studies.workers import Workers

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
