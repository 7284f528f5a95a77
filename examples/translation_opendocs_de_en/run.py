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
from methods import METHODS  # noqa: E402
from settings import TranslationSettings  # noqa: E402


def parse_arguments(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2], metavar="N", help="default: 1 2")
    add(
        "--methods",
        nargs="+",
        choices=list(METHODS),
        default=list(METHODS),
        metavar="METHOD",
        help=f"default: all of {', '.join(METHODS)}",
    )
    add(
        "--updates",
        type=int,
        default=1500,
        metavar="N",
        help="of each training (default: %(default)s)",
    )
    add(
        "--corpus",
        type=Path,
        default=EXAMPLES / "data" / "opendocs_de_en",
        metavar="DIR",
        help="folder with corpus.json and its archive, or with train.de, train.en, valid.de and "
        "so on (default: the corpus that ships)",
    )
    add(
        "--work-dir",
        type=Path,
        default=Path("outputs/translation_opendocs_de_en"),
        metavar="DIR",
        help="everything is written here (default: %(default)s)",
    )
    add(
        "--at-once",
        type=int,
        default=2,
        metavar="N",
        help="trainings side by side on a CPU, each with its share of the cores "
        "(default: %(default)s)",
    )
    add("--cpu", action="store_true", help="leave the GPU alone")
    for flag, of_what in (
        ("vocabulary", "subwords"),
        ("dim", "dimensions of embeddings and layers"),
        ("layers", "layers of encoder and of decoder"),
        ("max-tokens", "tokens an update"),
    ):
        add(
            f"--{flag}",
            type=int,
            default=getattr(TranslationSettings, flag.replace("-", "_")),
            metavar="N",
            help=f"{of_what} (default: %(default)s)",
        )
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
