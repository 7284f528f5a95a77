"""The steps of the job, in order."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List, Sequence

import torch

import corpus
import report
from jobs import Job, Usage, find_command, run_jobs
from recipes import (
    RECIPES,
    TrainingProgress,
    TranslationProgress,
    generate_command,
    preprocess_command,
    read_training_log,
    read_translations,
    train_command,
)
from settings import UPDATES, Settings
from spectral_fairseq.errors import ConfigurationError
from workdir import WorkDir, write_json, write_text

DISK_SPACE = 400_000_000  # bytes: two checkpoints and one being written for each of the models
STEPS = 6
LABELS = {recipe: label for recipe, (label, _) in RECIPES.items()}


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings that the command line asks for on this machine.

    Raises:
        ConfigurationError: a number that makes no sense.
    """
    device = "cuda" if torch.cuda.is_available() and not arguments.cpu else "cpu"
    updates = UPDATES[device] if arguments.updates is None else arguments.updates
    for flag, value, least in (
        ("--updates", updates, 1),
        ("--vocabulary", arguments.vocabulary, 1),
        ("--dim", arguments.dim, Settings.attention_heads),
        ("--seed", arguments.seed, 0),
    ):
        if value < least:
            raise ConfigurationError(f"{flag} of at least {least}", str(value), "Correct it.")
    if arguments.dim % Settings.attention_heads:
        raise ConfigurationError(
            f"--dim divisible by {Settings.attention_heads}", str(arguments.dim), "Correct it."
        )
    return Settings(
        seed=arguments.seed,
        updates=updates,
        device=device,
        corpus=corpus.load_manifest(arguments.corpus)["sha256"],
        vocabulary=arguments.vocabulary,
        dim=arguments.dim,
    )


def check_installation() -> None:
    """Find all tools before the first minute is spent.

    Raises:
        ConfigurationError: one is missing.
    """
    for command in ("fairseq-preprocess", "fairseq-train", "fairseq-generate"):
        find_command(command)
    for module in ("sentencepiece", "sacrebleu", "matplotlib"):
        if importlib.util.find_spec(module) is None:
            raise ConfigurationError(
                f"the Python package {module}",
                f"none for {sys.executable}",
                "Run `make setup`, and start the quickstart with .venv/bin/python.",
            )


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Quickstart:
    """The steps, each of which reads what earlier ones left in the work folder."""

    def __init__(self, arguments: argparse.Namespace, settings: Settings, work: WorkDir) -> None:
        self.settings, self.work, self.root = settings, work, work.root
        self.corpus_dir: Path = arguments.corpus
        manifest = corpus.load_manifest(arguments.corpus)
        self.source, self.target = manifest["source_language"], manifest["target_language"]
        self.test_pairs: int = manifest["splits"]["test"]["pairs"]
        self.text, self.subwords = self.root / "text", self.root / "subwords"
        self.model, self.binary = self.root / "subwords.model", self.root / "binary"
        cores = available_cores()
        self.gpu = settings.device == "cuda"
        self.together = cores > 1 and not (self.gpu or arguments.one_by_one)
        self.threads = max(1, cores // 2) if self.together else cores
        self.commands: Dict[str, List[str]] = {
            "preprocess": preprocess_command(self.source, self.target, self.subwords, self.binary)
        }
        for recipe in RECIPES:
            checkpoints = self.root / recipe / "checkpoints"
            self.commands[f"train_{recipe}"] = train_command(
                recipe, settings, self.source, self.target, self.binary, checkpoints
            )
            self.commands[f"translate_{recipe}"] = generate_command(
                settings,
                self.source,
                self.target,
                self.binary,
                checkpoints / "checkpoint_best.pt",
            )

    def run(self) -> str:
        """All steps; returns the table."""
        work = self.work
        self.say(1, f"corpus {self.corpus_dir.name}", "unpack", "learn_subwords", "encode")
        work.step("unpack", lambda: corpus.unpack(self.corpus_dir, self.text))
        work.step(
            "learn_subwords",
            lambda: corpus.learn_subwords(self.text, self.model, self.settings.vocabulary),
        )
        work.step("encode", lambda: corpus.encode(self.text, self.model, self.subwords))
        self.say(2, "fairseq-preprocess", "preprocess")
        work.step("preprocess", self.preprocess)
        how = "at once" if self.together else "one after the other"
        self.say(
            3,
            f"fairseq-train, {self.settings.updates} updates, both recipes {how} on the "
            f"{'GPU' if self.gpu else 'CPU'}",
            "train",
        )
        work.step("train", self.train)
        self.say(4, f"fairseq-generate, {self.test_pairs} sentences", "translate")
        work.step("translate", self.translate)
        self.say(5, "scores and measures", "measure")
        work.step("measure", self.measure)
        self.say(6, "table and picture")
        return self.write_results()

    def say(self, number: int, what: str, *steps: str) -> None:
        """One line for a step."""
        before = " (done before)" if steps and all(map(self.work.is_done, steps)) else ""
        print(f"[{number}/{STEPS}] {what}{before}", flush=True)

    def preprocess(self) -> Dict[str, Any]:
        """Binarise."""
        corpus.clear(self.binary)
        job = Job(
            "preprocess",
            self.commands["preprocess"],
            self.root / "preprocess.log",
            1,
            " step",
            lambda line: None,
        )
        self.run_jobs([job])
        return {}

    def train(self) -> Dict[str, Any]:
        """Train both recipes for the same number of updates."""
        jobs = []
        for recipe, label in LABELS.items():
            if not self.work.is_done(f"train_{recipe}"):
                jobs.append(
                    Job(
                        label,
                        self.commands[f"train_{recipe}"],
                        self.root / recipe / "train.log",
                        self.settings.updates,
                        " updates",
                        TrainingProgress(),
                    )
                )
        self.run_jobs(jobs, on_end=self.training_ended)
        return {}

    def training_ended(self, job: Job, usage: Usage) -> None:
        """Note the peak memory over all interruptions, and a training that is complete.

        A complete one must not be started again: fairseq would make one more update.
        """
        folder = job.log.parent
        peak = max(self.read_memory(folder), usage.peak_bytes)
        write_json(folder / "memory.json", {"peak_bytes": peak})
        if usage.exit_status == 0:
            self.work.mark_done(f"train_{folder.name}", {})

    @staticmethod
    def read_memory(folder: Path) -> int:
        """Peak resident memory in bytes noted so far; 0 if none."""
        path = folder / "memory.json"
        return json.loads(path.read_text("utf-8"))["peak_bytes"] if path.exists() else 0

    def translate(self) -> Dict[str, Any]:
        """Translate the test split with each best checkpoint."""
        jobs = []
        for recipe, label in LABELS.items():
            log = self.root / recipe / "translate.log"
            if log.exists():
                log.unlink()  # of an interrupted run
            jobs.append(
                Job(
                    label,
                    self.commands[f"translate_{recipe}"],
                    log,
                    self.test_pairs,
                    " sentences",
                    TranslationProgress(),
                )
            )
        self.run_jobs(jobs)
        for recipe in RECIPES:
            lines = read_translations(self.root / recipe / "translate.log", self.test_pairs)
            write_text(
                self.root / recipe / f"test.{self.target}", "".join(f"{line}\n" for line in lines)
            )
        return {}

    def measure(self) -> Dict[str, Any]:
        """All figures of both recipes."""
        references = corpus.read_lines(self.text / f"test.{self.target}")
        recipes = {}
        for recipe in RECIPES:
            folder = self.root / recipe
            training = read_training_log(folder / "train.log")
            peak = self.read_memory(folder)
            if self.gpu:
                total = torch.cuda.get_device_properties(0).total_memory
                peak = int(total - training["gpu_free_gb"] * 2**30)
            recipes[recipe] = {
                **report.scores(corpus.read_lines(folder / f"test.{self.target}"), references),
                **training,
                "peak_bytes": peak,
                **report.table_figures(folder / "checkpoints" / "checkpoint_best.pt", self.binary),
            }
        return {"versions": report.versions(), "recipes": recipes}

    def write_results(self) -> str:
        """``results.json``, ``results.txt`` and the picture; returns the text."""
        measured = self.work.result("measure")
        recipes = measured["recipes"]
        seconds = sum(
            self.work.result(step)["seconds"]
            for step in (
                "unpack",
                "learn_subwords",
                "encode",
                "preprocess",
                "train",
                "translate",
                "measure",
            )
        )
        write_json(
            self.root / "results.json",
            {
                "settings": asdict(self.settings),
                "together": self.together,
                "threads": self.threads,
                "seconds": round(seconds, 1),
                **measured,
                "commands": self.commands,
            },
        )
        report.draw_spectra(recipes, LABELS, self.root)
        first = next(iter(recipes.values()))
        text = (
            report.format_table(recipes, list(LABELS.values()), self.gpu)
            + f"\n{first['bleu_signature']}\n{first['chrf_signature']}\n"
            f"seed {self.settings.seed}, {self.settings.updates} updates each, "
            f"{first['words']} words in {first['dimensions']} dimensions, "
            f"{seconds / 60:.1f} minutes in all\n"
        )
        write_text(self.root / "results.txt", text)
        return text

    def run_jobs(self, jobs: Sequence[Job], **options: Any) -> None:
        """Jobs with this run's threads and device."""
        run_jobs(
            jobs,
            together=self.together,
            threads=self.threads,
            gpu=self.gpu,
            lock_fd=self.work.lock_fd,
            **options,
        )


def run(arguments: argparse.Namespace) -> str:
    """Check everything that can be checked at once, then do what is left to do.

    Returns:
        The table.
    """
    settings = settings_of(arguments)
    check_installation()
    work = WorkDir(arguments.work_dir)
    with work.locked():
        work.keep_settings(asdict(settings))
        if not work.is_done("train"):
            work.need_space(DISK_SPACE)
        return Quickstart(arguments, settings, work).run()
