"""The steps: prepare, train, translate, measure, tabulate. Each step is done once."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any, Dict, List

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq_examples import tables
from spectral_fairseq_examples.common import corpus, measures
from spectral_fairseq_examples.common.machine import check_installation, device
from spectral_fairseq_examples.common.training import train_all
from spectral_fairseq_examples.common.translation_job import PreparedCorpus, TranslationRun
from spectral_fairseq_examples.common.translation_settings import TranslationSettings
from spectral_fairseq_examples.common.workdir import WorkDir, write_json, write_text
from spectral_fairseq_examples.common.workers import Workers
from spectral_fairseq_examples.translation_opendocs_de_en.methods import METHODS

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
            "versions": measures.versions(),
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
