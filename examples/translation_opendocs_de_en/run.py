"""Plain fairseq against each method at one budget, over several seeds, with a table at the end.

Prepares the corpus, trains every method with every seed, translates the test set, measures the
embedding tables. What is finished is not done again: after an interruption give the same command,
and for more seeds or methods give more of them.
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
from methods import METHODS  # noqa: E402
from settings import TranslationSettings  # noqa: E402


def parse_arguments(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Command line."""
    parser = comparison_parser(
        __doc__.split("\n\n")[0], METHODS, 1500, "outputs/translation_opendocs_de_en"
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        default=EXAMPLES / "data" / "opendocs_de_en",
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


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Command-line entry; returns the exit status."""
    arguments = parse_arguments(argv)

    def action() -> str:
        import experiment  # not at the top: torch and fairseq take seconds to import

        return f"\n{experiment.run(arguments)}"

    return exit_status(action, arguments.work_dir)


if __name__ == "__main__":
    sys.exit(main())
