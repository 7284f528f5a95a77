"""Compare each paper's method on an AWD-LSTM with the AWD-LSTM alone, at one small budget.

Prepares the corpus, trains every method with every seed for the same number of updates, measures
perplexity with carried state and the embedding tables. Finished steps are not repeated: after
an interruption give the same command, and for more seeds or methods give more of them.
"""

from __future__ import annotations

import argparse
from typing import Optional, Sequence

from studies.comparison_options import add_sizes, comparison_parser
from studies.language_models import LanguageModelSettings, add_corpus
from studies.running import exit_status
from studies.sotu import METHODS


def parse_arguments(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Parsed command line."""
    parser = comparison_parser(
        __doc__.split("\n\n")[0],
        METHODS,
        1200,
        "outputs/lm_sotu_compare",
        "; about 2,620 are an epoch",
    )
    add_corpus(parser)
    sizes = (
        ("dim", "width of the embeddings"),
        ("hidden", "width of the LSTM layers but the last"),
    )
    add_sizes(parser, LanguageModelSettings, sizes)
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; returns the exit status."""
    arguments = parse_arguments(argv)

    def action() -> str:
        from studies import sotu

        return f"\n{sotu.compare(arguments)}"

    return exit_status(action, arguments.work_dir)
