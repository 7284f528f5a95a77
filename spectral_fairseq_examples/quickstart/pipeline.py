"""The steps of the quickstart, in order."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any, Dict, List

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq_examples.common import corpus, measures
from spectral_fairseq_examples.common.machine import available_cores, check_installation, device
from spectral_fairseq_examples.common.training import train_all
from spectral_fairseq_examples.common.translation_job import (
    PREPARATION,
    PreparedCorpus,
    TranslationRun,
)
from spectral_fairseq_examples.common.translation_settings import TranslationSettings
from spectral_fairseq_examples.common.workdir import WorkDir, write_json, write_text
from spectral_fairseq_examples.common.workers import Workers
from spectral_fairseq_examples.quickstart import report
from spectral_fairseq_examples.quickstart.recipes import RECIPES, UPDATES

DATA_BYTES = 50_000_000  # text, binary data and the report
STEPS = 6
LABELS = {recipe: label for recipe, (label, _) in RECIPES.items()}


def settings_of(arguments: argparse.Namespace) -> TranslationSettings:
    """The settings that the command line asks for on this machine.

    Raises:
        ConfigurationError: a number that makes no sense.
    """
    where = device(arguments.cpu)
    updates = UPDATES[where] if arguments.updates is None else arguments.updates
    heads = TranslationSettings.attention_heads
    for flag, value, least in (
        ("--updates", updates, 1),
        ("--vocabulary", arguments.vocabulary, 1),
        ("--dim", arguments.dim, heads),
        ("--seed", arguments.seed, 0),
    ):
        if value < least:
            raise ConfigurationError(f"{flag} of at least {least}", str(value), "Correct it.")
    if arguments.dim % heads:
        raise ConfigurationError(f"--dim divisible by {heads}", str(arguments.dim), "Correct it.")
    return TranslationSettings(
        seed=arguments.seed,
        updates=updates,
        device=where,
        corpus=corpus.load_manifest(arguments.corpus)["sha256"],
        vocabulary=arguments.vocabulary,
        dim=arguments.dim,
    )


class Quickstart:
    """The steps, which read the results of earlier steps from the work folder."""

    def __init__(
        self, arguments: argparse.Namespace, settings: TranslationSettings, work: WorkDir
    ) -> None:
        self.settings, self.work, self.root = settings, work, work.root
        self.data = PreparedCorpus(arguments.corpus, work, settings.vocabulary)
        together = available_cores() > 1 and not arguments.one_by_one
        self.workers = Workers(work, settings.device, 2 if together else 1)
        self.runs: Dict[str, TranslationRun] = {
            recipe: TranslationRun(label, flags, settings, self.data, self.root / recipe)
            for recipe, (label, flags) in RECIPES.items()
        }

    def run(self) -> str:
        """Do all steps; returns the table."""
        work = self.work
        self.say(1, f"corpus {self.data.folder.name}", "unpack", "learn_subwords", "encode")
        self.data.encode()
        self.say(2, "fairseq-preprocess", "preprocess")
        self.data.binarise(self.workers)
        how = "at once" if self.workers.at_once > 1 else "one after the other"
        self.say(
            3,
            f"fairseq-train, {self.settings.updates} updates, both recipes {how} on the "
            f"{'GPU' if self.workers.gpu else 'CPU'}",
            "train",
        )
        work.step("train", self.train)
        self.say(4, f"fairseq-generate, {self.data.test_pairs} sentences", "translate")
        work.step("translate", self.translate)
        self.say(5, "scores and measures", "measure")
        work.step("measure", self.measure)
        self.say(6, "table and picture")
        return self.write_results()

    def say(self, number: int, what: str, *steps: str) -> None:
        """Print a line that announces a step."""
        before = " (done before)" if steps and all(map(self.work.is_done, steps)) else ""
        print(f"[{number}/{STEPS}] {what}{before}", flush=True)

    def train(self) -> Dict[str, Any]:
        """Train both recipes for the same number of updates."""
        train_all(list(self.runs.values()), self.workers)
        return {}

    def translate(self) -> Dict[str, Any]:
        """Translate the test split with each best checkpoint."""
        self.workers.run([run.translation() for run in self.runs.values()])
        return {}

    def measure(self) -> Dict[str, Any]:
        """Measure all figures of both recipes."""
        self.workers.run([run.analysis() for run in self.runs.values()])
        recipes = {recipe: run.figures() for recipe, run in self.runs.items()}
        return {"versions": measures.versions(), "recipes": recipes}

    def commands(self) -> Dict[str, List[str]]:
        """Every command of fairseq that the job runs."""
        commands = {"preprocess": self.data.preprocess}
        for recipe, run in self.runs.items():
            commands[f"train_{recipe}"] = run.train_command
            commands[f"translate_{recipe}"] = run.translate_command
        return commands

    def write_results(self) -> str:
        """Write ``results.json``, ``results.txt`` and the picture; returns the text."""
        measured = self.work.result("measure")
        recipes = measured["recipes"]
        steps = (*PREPARATION, "train", "translate", "measure")
        seconds = sum(self.work.result(step)["seconds"] for step in steps)
        write_json(
            self.root / "results.json",
            {
                "settings": asdict(self.settings),
                "together": self.workers.at_once > 1,
                "threads": self.workers.threads,
                "seconds": round(seconds, 1),
                **measured,
                "commands": self.commands(),
            },
        )
        report.draw_spectra(recipes, LABELS, self.root)
        first = next(iter(recipes.values()))
        text = (
            report.format_table(recipes, list(LABELS.values()), self.workers.gpu)
            + f"\n{first['bleu_signature']}\n{first['chrf_signature']}\n"
            f"seed {self.settings.seed}, {self.settings.updates} updates each, "
            f"{first['words']} words in {first['dimensions']} dimensions, "
            f"{seconds / 60:.1f} minutes in all\n"
        )
        write_text(self.root / "results.txt", text)
        return text


def run(arguments: argparse.Namespace) -> str:
    """Check the options and the installation, then do all steps.

    Returns:
        The table.
    """
    settings = settings_of(arguments)
    check_installation()
    work = WorkDir(arguments.work_dir)
    with work.locked():
        if not work.is_done("train"):
            work.need_space(DATA_BYTES + len(RECIPES) * settings.checkpoint_bytes())
        work.keep_settings(asdict(settings))
        return Quickstart(arguments, settings, work).run()
