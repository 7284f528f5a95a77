"""Compare an existing fairseq recipe with the same recipe under spectrum control, on real text.

Prepares the German-English corpus that ships with the project, trains both, translates the test
set, and prints a table; ``python examples/quickstart/quickstart.py --help`` lists the options.
Finished steps are not repeated, so the same command continues an interrupted run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import shorten
from typing import Any, Dict, List, Optional, Sequence, Tuple

from spectral_fairseq.analysis import analyze
from spectral_fairseq.analysis.wording import ADVICE
from spectral_fairseq.errors import ConfigurationError
from studies import corpus, training
from studies.machine import available_cores, check_installation, device
from studies.quickstart_figures import draw_spectra, format_table
from studies.running import Job, exit_status
from studies.training import train_all
from studies.translation import (
    PREPARATION,
    USER_DIR,
    PreparedCorpus,
    TranslationProgress,
    TranslationRun,
    TranslationSettings,
    length_limit,
    read_translations,
)
from studies.work_folder import WorkDir, write_json, write_text
from studies.workers import Workers

# recipe -> (label, flags in which the recipes differ)
RECIPES: Dict[str, Tuple[str, Tuple[str, ...]]] = {
    "plain": (
        "plain",
        ("--arch", "transformer", "--criterion", "label_smoothed_cross_entropy"),
    ),
    "spectrum_control": (
        "spectrum control",
        ("--arch", "transformer_sc", "--criterion", "spectrum_control"),
    ),
}

# Both recipes train for the same number of updates, because their tables are compared after equal
# work. The short job is for two CPU cores and about four minutes, so it has a small vocabulary,
# which is learned in fewer updates. The long one takes two to three times as long.
UPDATES = {"cpu": 400, "cuda": 8000}
LONG_UPDATES = {"cpu": 2000, "cuda": 8000}
SHORT_VOCABULARY = 2000
SHORT_SURPLUS = 12
# The short job has this package's forms of the loss and of dropout, and a rate that falls to zero.
SHORT = (
    "--criterion {criterion} --fast-dropout --lr 0.004 --warmup-updates 100 --lr-scheduler"
    " polynomial_decay --total-num-update {updates} --end-learning-rate 0 --power 1"
)
# Its first look, after this share of the updates, at the translations of so many sentences.
FIRST_LOOK = 0.3
SAMPLES = 3


DATA_BYTES = 50_000_000  # text, binary data and the report
STEPS = 6
LABELS = {recipe: label for recipe, (label, _) in RECIPES.items()}
REPORT = Path("report", "report.html")
"""The page on both tables, in the work folder."""


def _best_checkpoint(root: Path, recipe: str) -> Path:
    return root / recipe / "checkpoints" / "checkpoint_best.pt"


def settings_of(arguments: argparse.Namespace) -> TranslationSettings:
    """The settings that the command line asks for on this machine.

    Raises:
        ConfigurationError: a number that makes no sense.
    """
    where = device(arguments.cpu)
    usual, words = UPDATES, SHORT_VOCABULARY
    if arguments.long:
        usual, words = LONG_UPDATES, TranslationSettings.vocabulary
    updates = usual[where] if arguments.updates is None else arguments.updates
    vocabulary = words if arguments.vocabulary is None else arguments.vocabulary
    heads = TranslationSettings.attention_heads
    for flag, value, least in (
        ("--updates", updates, 1),
        ("--vocabulary", vocabulary, 1),
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
        vocabulary=vocabulary,
        dim=arguments.dim,
        surplus=TranslationSettings.surplus if arguments.long else SHORT_SURPLUS,
    )


class Samples:
    """A few sentences of the test set, translated while a model learns and when it has learned.

    Args:
        data: the corpus.
        run: the training whose best checkpoint translates.
        device: ``cpu`` or ``cuda``.
    """

    def __init__(self, data: PreparedCorpus, run: TranslationRun, device: str) -> None:
        self.folder, self.data, self.device = data.work.root / "samples", data, device
        self.best = run.best
        self.source, self.target = (
            corpus.read_lines(data.text / f"test.{language}")
            for language in (data.source, data.target)
        )
        self.subwords = corpus.read_lines(data.subwords / f"test.{data.source}")

        def pieces(index: int) -> float:
            return len(self.subwords[index].split()) / words[index]

        # Short ones of common words, which are in few pieces, wherever they stand.
        words = {index: len(line.split()) for index, line in enumerate(self.source) if line.split()}
        short = [index for index, count in words.items() if 5 <= count <= 9]
        self.chosen = sorted(sorted(short or words, key=pieces)[:SAMPLES])

    def _log(self, updates: int) -> Path:
        return self.folder / f"after-{updates}.log"

    def job(self, updates: int) -> Job:
        """The job that translates them, after so many updates."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / "source"
        write_text(path, "".join(f"{self.subwords[index]}\n" for index in self.chosen))
        log = self._log(updates)
        log.unlink(missing_ok=True)  # left by an interrupted run
        command = ["fairseq-interactive", str(self.data.binary), "--user-dir", USER_DIR]
        command += ["--path", str(self.best), "--input", str(path), "--beam", "5"]
        command += ["--source-lang", self.data.source, "--target-lang", self.data.target]
        command += ["--remove-bpe", "sentencepiece", "--buffer-size", "8", "--batch-size", "8"]
        command += length_limit(SHORT_SURPLUS)
        command += ["--cpu"] if self.device == "cpu" else []
        count = len(self.chosen)
        return Job("samples", command, log, count, " sentences", TranslationProgress())

    def translations(self, updates: int) -> List[str]:
        """What the job has printed."""
        return read_translations(self._log(updates), len(self.chosen))

    def text(self, after: Dict[int, List[str]]) -> str:
        """Each sentence with its reference and its translations, by the number of updates."""
        lines = []
        for place, index in enumerate(self.chosen):
            rows = [("source", self.source[index])]
            rows += [(f"after {updates:,}", found[place]) for updates, found in after.items()]
            rows += [("reference", self.target[index])]
            lines += ["", *(f"  {name:>12}  {shorten(line, 80)}" for name, line in rows)]
        return "\n".join([*lines, ""])


class Quickstart:
    """The steps, which read the results of earlier steps from the work folder."""

    def __init__(
        self, arguments: argparse.Namespace, settings: TranslationSettings, work: WorkDir
    ) -> None:
        self.settings, self.work, self.root = settings, work, work.root
        self.data = PreparedCorpus(arguments.corpus, work, settings.vocabulary)
        together = available_cores() > 1 and not arguments.one_by_one
        self.workers = Workers(work, settings.device, 2 if together else 1)
        self.long = arguments.long
        self.runs = self.runs_until(settings.updates)
        self.first_look = max(1, round(FIRST_LOOK * settings.updates))

    def samples(self) -> Samples:
        """The sentences of the first look, once the text has been encoded."""
        return Samples(self.data, self.runs["plain"], self.settings.device)

    def runs_until(self, updates: int) -> Dict[str, TranslationRun]:
        """The trainings of both recipes up to an update; they go on from an earlier one."""
        settings = replace(self.settings, updates=updates)
        runs = {}
        for recipe, (label, flags) in RECIPES.items():
            if not self.long:
                criterion = "spectrum_control" if recipe != "plain" else "regularized_cross_entropy"
                short = SHORT.format(criterion=criterion, updates=self.settings.updates)
                flags = (*flags, *short.split())
            runs[recipe] = TranslationRun(label, flags, settings, self.data, self.root / recipe)
            runs[recipe].stamp += f"_{updates}"
        return runs

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
        self.say(6, "table, picture and page", "report")
        work.step("report", self.report)
        return self.write_results()

    def say(self, number: int, what: str, *steps: str) -> None:
        """Print a line that announces a step."""
        before = " (done before)" if steps and all(map(self.work.is_done, steps)) else ""
        print(f"[{number}/{STEPS}] {what}{before}", flush=True)

    def train(self) -> Dict[str, Any]:
        """Train both recipes for the same number of updates, with a look at plain on the way."""
        if not self.long:
            train_all(list(self.runs_until(self.first_look).values()), self.workers)
            # Once: after an interruption later on, the best checkpoint is one of more updates.
            self.work.step("look", self.look)
        train_all(list(self.runs.values()), self.workers)
        return {}

    def look(self) -> Dict[str, Any]:
        """Show what the plain model translates after few updates, and its table."""
        samples = self.samples()
        self.workers.run([samples.job(self.first_look)])
        found = samples.translations(self.first_look)
        print(samples.text({self.first_look: found}), flush=True)
        print(f"{analyze(self.runs['plain'].best)}\n", flush=True)
        return {}

    def translate(self) -> Dict[str, Any]:
        """Translate the test split with each best checkpoint."""
        self.workers.run([run.translation() for run in self.runs.values()])
        if not self.long:
            samples, lines = self.samples(), self.runs["plain"].hypotheses()
            after = {self.first_look: samples.translations(self.first_look)}
            after[self.settings.updates] = [lines[index] for index in samples.chosen]
            print(samples.text(after), flush=True)
        return {}

    def measure(self) -> Dict[str, Any]:
        """Measure all figures of both recipes."""
        self.workers.run([run.analysis() for run in self.runs.values()])
        recipes = {recipe: run.figures() for recipe, run in self.runs.items()}
        return {"versions": training.versions(), "recipes": recipes}

    def report(self) -> Dict[str, Any]:
        """Write the page that puts both tables side by side."""
        found = analyze(
            *(_best_checkpoint(self.root, recipe) for recipe in RECIPES),
            labels=list(LABELS.values()),
        )
        found.command = "compare"
        found.write(self.root / REPORT.parent, overwrite=True)
        return {}

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
        steps = (*PREPARATION, "train", "translate", "measure", "report")
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
        draw_spectra(recipes, LABELS, self.root)
        first = next(iter(recipes.values()))
        text = (
            format_table(recipes, list(LABELS.values()), self.workers.gpu)
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


def parse_arguments(argv: Optional[Sequence[str]], default_corpus: Path) -> argparse.Namespace:
    """Parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path("quickstart"),
        metavar="DIR",
        help="everything is written here (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="of both trainings (default: %(default)s)"
    )
    parser.add_argument(
        "--updates",
        type=int,
        metavar="N",
        help=f"of both trainings (default: {UPDATES['cpu']}, or {LONG_UPDATES['cpu']} with --long; "
        f"on a GPU {UPDATES['cuda']})",
    )
    parser.add_argument("--cpu", action="store_true", help="leave the GPU alone")
    parser.add_argument(
        "--long",
        action="store_true",
        help="the recipes of fairseq as they are, for "
        f"{LONG_UPDATES['cpu']} updates, without looks on the way",
    )
    parser.add_argument(
        "--one-by-one",
        action="store_true",
        help="on a CPU, train one model after the other, each with all cores, "
        "instead of both at once with half of them",
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        default=default_corpus,
        metavar="DIR",
        help="folder with corpus.json and its archive, or with train.de, train.en and so on "
        "(default: the one shipped)",
    )
    parser.add_argument(
        "--vocabulary",
        type=int,
        metavar="N",
        help=f"subwords (default: {SHORT_VOCABULARY}; {TranslationSettings.vocabulary} if --long)",
    )
    parser.add_argument(
        "--dim",
        type=int,
        default=TranslationSettings.dim,
        metavar="D",
        help="of embeddings and layers (default: %(default)s)",
    )
    return parser.parse_args(argv)


def what_next(root: Path) -> str:
    """Text that says where the results are and what to try next."""
    best = shlex.quote(str(_best_checkpoint(root, "spectrum_control")))
    advice = "\n".join(f"  {part}" for part in f"{ADVICE}:".replace(". ", ".\n").splitlines())
    beside = Path(sys.executable).with_name("spectral-fairseq")
    command = shlex.quote(os.path.relpath(beside) if beside.exists() else beside.name)
    return f"""
Both tables side by side, for a browser: {root / REPORT}

In {root}/:
  spectra.png, spectra.svg      the singular values of both tables, with the prior
  results.json, results.txt     every figure with its options, versions and commands
  plain/, spectrum_control/     checkpoints, translations (test.en) and logs

Next:
  {command} export {best} plain.pt
      a plain checkpoint that fairseq loads without this package

Spectrum control is shown here because its effect is seen after minutes; one seed says nothing about
quality. For your own recipe:
{advice}
      --user-dir "$({command} user-dir)" --arch transformer_wn_iwslt_de_en --weight-decay 0.1
"""


def main(argv: Optional[Sequence[str]] = None, *, default_corpus: Path) -> int:
    """Run the command; returns the exit status."""
    arguments = parse_arguments(argv, default_corpus)

    def action() -> str:

        return f"\n{run(arguments)}{what_next(arguments.work_dir)}"

    return exit_status(action, arguments.work_dir)
