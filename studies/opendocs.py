"""Compare plain fairseq with each method at one budget over several seeds.

Prepares the corpus, trains every method with every seed, translates the test set, measures the
embedding tables. Finished steps are not repeated: after an interruption, give the same command,
and for more seeds or methods give more of them.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from spectral_fairseq.errors import ConfigurationError
from studies import corpus, tables, training
from studies.comparison_options import add_sizes, comparison_parser
from studies.machine import check_installation, device
from studies.running import exit_status
from studies.training import train_all
from studies.translation import PreparedCorpus, TranslationRun, TranslationSettings
from studies.work_folder import WorkDir, write_json, write_text
from studies.workers import Workers

# The adversarial softmax, R-Drop and the mixtures need a criterion of this package.
NO_PENALTY = ("--criterion", "regularized_cross_entropy")
PLAIN_LOSS = ("--criterion", "label_smoothed_cross_entropy")


@dataclass(frozen=True)
class Method:
    """A method of the comparison.

    Args:
        label: what the table calls it.
        flags: what it adds to the common recipe.
    """

    label: str
    flags: Tuple[str, ...]


def _softmax(label: str, *flags: str) -> Method:
    """The plain architecture and loss with flags that need a criterion of this package."""
    return Method(label, ("--arch", "transformer", *NO_PENALTY, *flags))


METHODS: Dict[str, Method] = {
    "plain": Method("plain", ("--arch", "transformer", *PLAIN_LOSS)),
    "spectrum_control": Method(
        "spectrum control",
        ("--arch", "transformer_sc", "--criterion", "spectrum_control"),
    ),
    "spectrum_control_paper": Method(
        "the same, factors not renewed",
        ("--arch", "transformer_sc", "--criterion", "spectrum_control", "--svd-interval", "0"),
    ),
    "spectrum_control_polynomial": Method(
        "the same, polynomial prior",
        (
            *("--arch", "transformer_sc", "--spectrum-prior", "polynomial"),
            *("--criterion", "spectrum_control", "--svd-interval", "0"),
        ),
    ),
    "decoupled": Method(
        "decoupled spectrum control",
        ("--arch", "transformer", "--criterion", "spectrum_control"),
    ),
    "cosreg": Method(
        "cosine regularisation", ("--arch", "transformer", "--criterion", "mle_cosreg")
    ),
    "weight_norm": Method(
        "weight-norm regularisation", ("--arch", "transformer", "--criterion", "weight_norm")
    ),
    "weight_norm_init": Method(
        "weight-norm initialisation",
        ("--arch", "transformer_wn", "--weight-norm-init-sigma", "0.5", *PLAIN_LOSS),
    ),
    "weight_norm_init_small": Method(
        "the same, sigma 0.15",
        ("--arch", "transformer_wn", "--weight-norm-init-sigma", "0.15", *PLAIN_LOSS),
    ),
    "adversarial": _softmax("adversarial softmax, 0.01", "--adversarial-epsilon", "0.01"),
    "mos": Method(
        "mixture of 4 softmaxes",
        ("--arch", "transformer_mos", "--mixture-components", "4", *NO_PENALTY),
    ),
    "mos_scaled": Method(
        "the same, contexts scaled by 4",
        (
            *("--arch", "transformer_mos", "--mixture-components", "4"),
            *("--mixture-context-scale", "4", *NO_PENALTY),
        ),
    ),
    "rdrop": _softmax("R-Drop, alpha 5", "--rdrop-weight", "5"),
}


DATA_BYTES = 20_000_000  # text and binary data


def settings_of(arguments: argparse.Namespace, seed: int) -> TranslationSettings:
    """The settings of all methods with one seed.

    Raises:
        ConfigurationError: a number that makes no sense.
    """
    heads = TranslationSettings.attention_heads
    for flag, value, least in (
        ("--seeds", seed, 0),
        ("--updates", arguments.updates, 1),
        ("--at-once", arguments.at_once, 1),
        ("--vocabulary", arguments.vocabulary, 1),
        ("--dim", arguments.dim, heads),
        ("--layers", arguments.layers, 1),
        ("--max-tokens", arguments.max_tokens, 1),
    ):
        if value < least:
            raise ConfigurationError(f"{flag} of at least {least}", str(value), "Correct it.")
    if arguments.dim % heads:
        raise ConfigurationError(f"--dim divisible by {heads}", str(arguments.dim), "Correct it.")
    return TranslationSettings(
        seed=seed,
        updates=arguments.updates,
        device=device(arguments.cpu),
        corpus=corpus.load_manifest(arguments.corpus)["sha256"],
        vocabulary=arguments.vocabulary,
        dim=arguments.dim,
        ffn_dim=2 * arguments.dim,
        layers=arguments.layers,
        max_tokens=arguments.max_tokens,
    )


class Experiment:
    """All trainings of a comparison: every method with every seed, in one work folder."""

    def __init__(self, arguments: argparse.Namespace, work: WorkDir) -> None:
        self.work = work
        of_seed = {seed: settings_of(arguments, seed) for seed in arguments.seeds}
        settings = next(iter(of_seed.values()))
        self.data = PreparedCorpus(arguments.corpus, work, settings.vocabulary)
        self.workers = Workers(work, settings.device, arguments.at_once)
        # Sorted by seed, so that methods can be compared as early as possible.
        self.runs: List[TranslationRun] = [
            TranslationRun(
                f"{method} {seed}",
                METHODS[method].flags,
                of_seed[seed],
                self.data,
                work.root / method / f"seed-{seed}",
            )
            for seed in of_seed
            for method in dict.fromkeys(arguments.methods)  # each once
        ]
        due = sum(not run.is_trained() for run in self.runs)
        work.need_space(DATA_BYTES + due * settings.checkpoint_bytes())
        common = asdict(settings)
        del common["seed"]
        work.keep_settings(common)

    def run(self) -> str:
        """Do everything that is not done yet; returns the table."""
        print("[1/4] corpus", flush=True)
        self.data.encode()
        self.data.binarise(self.workers)
        trained = sum(run.is_trained() for run in self.runs)
        print(f"[2/4] fairseq-train, {len(self.runs)} runs, {trained} done before", flush=True)
        train_all(self.runs, self.workers)
        left = [run for run in self.runs if not (run.folder / "figures.json").exists()]
        print(f"[3/4] fairseq-generate, {len(left)} runs", flush=True)
        self.workers.run([run.translation() for run in left])
        print("[4/4] spectral-fairseq analyze, scores", flush=True)
        self.workers.run([run.analysis() for run in left])
        for run in left:
            write_json(run.folder / "figures.json", self._figures(run))
            for checkpoint in run.best.parent.glob("*.pt"):
                if checkpoint != run.best:
                    checkpoint.unlink()  # training will not continue: see TrainingRun.is_trained
        table = tables.markdown(tables.read(self.work.root), baseline="plain")
        write_text(self.work.root / "table.md", table)
        return table

    def _figures(self, run: TranslationRun) -> Dict[str, Any]:
        return {
            **run.figures(),
            "versions": training.versions(),
            "settings": asdict(run.settings),
            "at_once": self.workers.at_once,
            "train_command": run.train_command,
            "translate_command": run.translate_command,
        }


def run(arguments: argparse.Namespace) -> str:
    """Check the options and the installation, then run the comparison.

    Returns:
        The table.
    """
    check_installation()
    for seed in arguments.seeds:
        settings_of(arguments, seed)
    work = WorkDir(arguments.work_dir)
    with work.locked():
        return Experiment(arguments, work).run()


def parse_arguments(argv: Optional[Sequence[str]], default_corpus: Path) -> argparse.Namespace:
    """Parsed command line."""
    parser = comparison_parser(
        __doc__.split("\n\n")[0], METHODS, 1500, "outputs/translation_opendocs_de_en"
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        default=default_corpus,
        metavar="DIR",
        help="folder with corpus.json and its archive, or with train.de, train.en, valid.de and "
        "so on (default: the corpus that ships)",
    )
    sizes = (
        ("vocabulary", "subwords"),
        ("dim", "dimensions of embeddings and layers"),
        ("layers", "layers of encoder and of decoder"),
        ("max-tokens", "tokens an update"),
    )
    add_sizes(parser, TranslationSettings, sizes)
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None, *, default_corpus: Path) -> int:
    """Run the command; returns the exit status."""
    arguments = parse_arguments(argv, default_corpus)

    def action() -> str:

        return f"\n{run(arguments)}"

    return exit_status(action, arguments.work_dir)
