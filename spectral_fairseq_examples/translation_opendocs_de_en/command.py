"""Compare plain fairseq with each method at one budget over several seeds.

Prepares the corpus, trains every method with every seed, translates the test set, measures the
embedding tables. Finished steps are not repeated: after an interruption, give the same command,
and for more seeds or methods give more of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional, Sequence

from spectral_fairseq_examples.common.command_line import exit_status
from spectral_fairseq_examples.common.comparison_options import add_sizes, comparison_parser
from spectral_fairseq_examples.common.translation_settings import TranslationSettings
from spectral_fairseq_examples.translation_opendocs_de_en.methods import METHODS


def parse_arguments(argv: Optional[Sequence[str]], default_corpus: Path) -> argparse.Namespace:
    """Parsed command line."""
    parser = comparison_parser(
        __doc__.split("\n\n")[0], METHODS, 1500, "outputs/translation_opendocs_de_en"
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        default=default_corpus,
        metavar="DIR",
        help="folder with corpus.json and its archive, or with train.de, train.en, valid.de and "
        "so on (default: the corpus that ships)",
    )
    sizes = (
        ("vocabulary", "subwords"),
        ("dim", "dimensions of embeddings and layers"),
        ("layers", "layers of encoder and of decoder"),
        ("max-tokens", "tokens an update"),
    )
    add_sizes(parser, TranslationSettings, sizes)
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None, *, default_corpus: Path) -> int:
    """Run the command; returns the exit status."""
    arguments = parse_arguments(argv, default_corpus)

    def action() -> str:
        from spectral_fairseq_examples.translation_opendocs_de_en import experiment  # imports torch

        return f"\n{experiment.run(arguments)}"

    return exit_status(action, arguments.work_dir)
