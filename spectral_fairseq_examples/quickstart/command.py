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
from pathlib import Path
from typing import Optional, Sequence

from spectral_fairseq_examples.common.command_line import exit_status
from spectral_fairseq_examples.common.translation_settings import TranslationSettings
from spectral_fairseq_examples.quickstart.recipes import UPDATES


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
        help=f"of both trainings (default: {UPDATES['cpu']}, on a GPU {UPDATES['cuda']})",
    )
    parser.add_argument("--cpu", action="store_true", help="leave the GPU alone")
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
        default=TranslationSettings.vocabulary,
        metavar="N",
        help="subwords (default: %(default)s)",
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
    best = root / "spectrum_control" / "checkpoints" / "checkpoint_best.pt"
    beside = Path(sys.executable).with_name("spectral-fairseq")
    command = shlex.quote(os.path.relpath(beside) if beside.exists() else beside.name)
    return f"""
In {root}/:
  spectra.png, spectra.svg      the singular values of both tables, with the prior
  results.json, results.txt     every figure with its options, versions and commands
  plain/, spectrum_control/     checkpoints, translations (test.en) and logs

Next:
  {command} export {shlex.quote(str(best))} plain.pt
      a plain checkpoint that fairseq loads without this package
  your own recipe: add  --user-dir "$({command} user-dir)"  and change two flags,
      --arch transformer_sc --criterion spectrum_control
"""


def main(argv: Optional[Sequence[str]] = None, *, default_corpus: Path) -> int:
    """Run the command; returns the exit status."""
    arguments = parse_arguments(argv, default_corpus)

    def action() -> str:
        from spectral_fairseq_examples.quickstart import pipeline  # imports torch

        return f"\n{pipeline.run(arguments)}{what_next(arguments.work_dir)}"

    return exit_status(action, arguments.work_dir)
