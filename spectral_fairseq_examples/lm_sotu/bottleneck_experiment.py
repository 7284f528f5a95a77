"""The steps of the measurement of the softmax bottleneck. Each step is done once."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any, Dict, Mapping, Tuple

from spectral_fairseq.analysis import plots
from spectral_fairseq.files import replacing
from spectral_fairseq_examples import tables
from spectral_fairseq_examples.common import measures
from spectral_fairseq_examples.common.machine import check_installation
from spectral_fairseq_examples.common.training import train_all
from spectral_fairseq_examples.common.workdir import WorkDir, write_json, write_text
from spectral_fairseq_examples.common.workers import Workers
from spectral_fairseq_examples.lm_sotu import experiment
from spectral_fairseq_examples.lm_sotu.bottleneck import KINDS, output_layers
from spectral_fairseq_examples.lm_sotu.job import LanguageModelRun, PreparedText
from spectral_fairseq_examples.lm_sotu.settings import BottleneckSettings

COLUMNS = ("valid_ppl", "log_probability_rank", "expected_pairwise_kl")


def measure(arguments: argparse.Namespace) -> str:
    """Train and measure every output layer with every seed; returns the table.

    The folder receives ``table.md``, ``spectra.png`` with the singular values of the runs of the
    first seed, and ``bottleneck.json`` with the figures of every run.

    Raises:
        ConfigurationError: a number that makes no sense, or a folder of other settings.
    """
    check_installation(experiment.COMMANDS, ("matplotlib",))
    experiment.check_least(
        ("components", min(arguments.components), 1),
        ("tokens", arguments.tokens, 2),
        ("at-once", arguments.at_once, 1),
    )
    of_seed = {
        seed: experiment.settings_of(
            arguments, seed, experiment.MANY_EPOCHS, arguments.updates, BottleneckSettings
        )
        for seed in arguments.seeds
    }
    work = WorkDir(arguments.work_dir)
    with work.locked():
        runs_to_come = len(of_seed) * len(output_layers(arguments.methods, arguments.components))
        experiment.need_space(work, of_seed[arguments.seeds[0]], runs_to_come)
        common = {**asdict(of_seed[arguments.seeds[0]]), "measured_tokens": arguments.tokens}
        del common["seed"]
        work.keep_settings(common)
        workers = Workers(work, common["device"], arguments.at_once)
        data = PreparedText(work, arguments.wheel, arguments.corpus)
        print("[1/3] corpus", flush=True)
        tokens = experiment.training_tokens(data.prepare(workers))
        layers = output_layers(arguments.methods, arguments.components)
        runs = [
            LanguageModelRun(
                f"{name} {seed}", flags, settings, data, work.root / name / f"seed-{seed}", tokens
            )
            for seed, settings in of_seed.items()
            for name, flags in layers.items()
        ]
        trained = sum(run.is_trained() for run in runs)
        print(f"[2/3] fairseq-train, {len(runs)} runs, {trained} done before", flush=True)
        train_all(runs, workers)
        left = [run for run in runs if not (run.folder / "figures.json").exists()]
        print(f"[3/3] spectral-fairseq analyze --data, {len(left)} runs", flush=True)
        workers.run([run.predictions(arguments.tokens) for run in left])
        for run in left:
            write_json(run.folder / "figures.json", figures(run))
        return tabulate(work)


def figures(run: LanguageModelRun) -> Dict[str, Any]:
    """What is kept of a run."""
    return {
        **run.training_figures(),
        **run.prediction_figures(),
        "versions": measures.versions(),
        "settings": asdict(run.settings),
        "train_command": run.train_command,
    }


def tabulate(work: WorkDir) -> str:
    """Write all results, of all runs in the folder; returns the table."""
    found = {
        path.parent.relative_to(work.root).as_posix(): json.loads(path.read_text("utf-8"))
        for path in sorted(work.root.glob("*/seed-*/figures.json"))
    }
    write_json(work.root / "bottleneck.json", found)
    table = tables.markdown(tables.read(work.root), "softmax", COLUMNS)
    write_text(work.root / "table.md", table)
    with replacing(work.root / "spectra.png") as partial:
        partial.write_bytes(picture(found))
    return table


def picture(found: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The singular values of the log-probabilities of each output layer's first seed, as PNG.

    Args:
        found: figures by ``softmax/seed-1`` and the like.
    """
    layers: Dict[str, Mapping[str, Any]] = {}
    for place in sorted(found, key=_kind_and_size):
        name = place.partition("/")[0]
        rank = {"log_probability_rank": found[place]["log_probability_rank"]}
        outputs = found[place]["outputs"]
        layers.setdefault(name, {"label": name, "outputs": outputs, "measures": rank})
    return plots.log_probability_spectra(list(layers.values())).files["light.png"]


def _kind_and_size(place: str) -> Tuple[int, int, int]:
    name, _, seed = place.partition("/seed-")
    kind, _, components = name.partition("-")
    return KINDS.index(kind), int(components or 1), int(seed)
