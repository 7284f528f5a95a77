"""``spectral-fairseq compare``: several checkpoints side by side, or one run over its epochs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import List

from spectral_fairseq.checkpoints.saved import STEP_FOLDER, saved_epochs, weights_file
from spectral_fairseq.commands.analyze import add_report_arguments, measure_and_print
from spectral_fairseq.errors import ConfigurationError, check_enough
from spectral_fairseq.files import names_in

DESCRIPTION = """\
Measure several models and put them side by side: one table, and their curves on common axes. The
models are files or folders as for analyze. A folder of a training run stands for all of its
checkpoints in the order of training: checkpoint<epoch>.pt and checkpoint_<epoch>_<updates>.pt of
fairseq, checkpoint-<updates> of transformers. With three or more of one run, the report also draws
the measures over the updates. A folder that holds a model as well stands for its checkpoints if
it is given alone, else for the model.
Example: spectral-fairseq compare plain.pt other.pt --out report
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the models and runs, and what ``analyze`` takes as well."""
    named = "file or folder of a model, or the folder of a training run"
    add_report_arguments(parser, "MODEL_OR_RUN", named)


def run(args: argparse.Namespace) -> int:
    """Measure the named checkpoints and those of named folders; returns the exit status 0."""
    paths: List[Path] = []
    for name in args.checkpoints:
        path = Path(name)
        paths += saved_epochs(path) if _is_run(path, len(args.checkpoints) == 1) else [path]
    remedy = "Name another, or a folder of several; spectral-fairseq analyze takes one alone."
    check_enough(len(paths), 2, "checkpoints to compare", remedy, ConfigurationError)
    return measure_and_print(args, paths, "compare")


def _is_run(path: Path, alone: bool) -> bool:
    """Whether a folder stands for its checkpoints; one with a model as well, if it is ``alone``."""
    if not os.path.isdir(path):
        return False
    has_steps = any(map(STEP_FOLDER.fullmatch, names_in(path)))
    return weights_file(path) is None or (alone and has_steps)
