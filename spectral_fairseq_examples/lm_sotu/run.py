"""Train an AWD-LSTM on real text, fine-tune it, and evaluate it as the papers do.

Prepares the corpus, trains with SGD, fine-tunes with averaged SGD, and measures perplexity on valid
and test: plain, with a continuous cache, with dynamic evaluation, the numbers of both searched on
valid. Finished steps are not repeated: after an interruption, give the same command.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional, Sequence

from spectral_fairseq_examples.common.command_line import exit_status
from spectral_fairseq_examples.lm_sotu.corpus_options import add_corpus
from spectral_fairseq_examples.lm_sotu.methods import METHODS

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
        from spectral_fairseq_examples.lm_sotu import experiment  # imports torch

        return f"\n{experiment.train_and_evaluate(arguments)}"

    return exit_status(action, arguments.work_dir)
