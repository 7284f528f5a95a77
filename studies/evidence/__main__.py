"""Run a study of docs/evidence.md, or write the tables and figures of its pages from the results.

    python -m studies.evidence translation --at-once 2
    python -m studies.evidence awd_lstm --corpus sotu    # made by examples/lm_sotu/sotu.py
    python -m studies.evidence report

After an interruption give the same command; what is recorded is not done again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Optional, Sequence

from studies.evidence.grid import STUDIES
from studies.running import exit_status
from studies.training_data import OPENDOCS, ROOT

RESULTS = ROOT / "studies" / "evidence" / "results"


def parse_arguments(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", choices=[*STUDIES, "report"], metavar="WHAT", help=", ".join([*STUDIES, "report"]))
    add("--at-once", type=int, default=2, metavar="N", help="trainings side by side (default: 2)")
    add("--methods", nargs="+", metavar="METHOD", default=(), help="and plain (default: all)")
    add("--corpus", type=Path, metavar="DIR", help="text (default: what ships; ./sotu)")
    add("--pairs", type=int, metavar="N", help="for translation (default: the study's)")
    add("--other-tests", type=Path, metavar="DIR", help="NAME.de and NAME.en, translated as well")
    add("--work-dir", type=Path, metavar="DIR", help="default: outputs/evidence/STUDY")
    add("--results", type=Path, default=RESULTS, metavar="DIR", help="default: %(default)s")
    add("--cpu", action="store_true", help="leave the GPU alone")
    arguments = parser.parse_args(argv)
    known = STUDIES[arguments.what].methods if arguments.what in STUDIES else {}
    unknown = sorted(set(arguments.methods) - set(known))
    if unknown:
        parser.error(f"expected methods from {', '.join(known)}; found {', '.join(unknown)}")
    translates = arguments.what in STUDIES and STUDIES[arguments.what].corpus == "translation"
    if (arguments.pairs is not None or arguments.other_tests) and not translates:
        parser.error(f"expected a study of translation for these flags; found {arguments.what}")
    if any(one is not None and one < 1 for one in (arguments.at_once, arguments.pairs)):
        parser.error("expected --at-once and --pairs of at least 1; found fewer")
    return arguments


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; returns the exit status."""
    arguments = parse_arguments(argv)
    work = (arguments.work_dir or Path("outputs") / "evidence" / arguments.what).resolve()

    def action() -> str:
        from studies.evidence import report

        if arguments.what == "report":
            return report.write_pages(arguments.results)
        from studies.evidence import corpora
        from studies.evidence.study import run_study
        from studies.machine import check_installation, device

        check_installation()
        study = STUDIES[arguments.what]
        others = arguments.other_tests
        corpus = (
            corpora.TranslationCorpus(
                work / "data",
                arguments.pairs or study.pairs,
                arguments.corpus or OPENDOCS,
                corpora.other_tests(others) if others else {},
            )
            if study.corpus == "translation"
            else corpora.LanguageModelCorpus(
                work / "data", arguments.corpus or Path("sotu"), study.words
            )
        )
        records = run_study(
            arguments.what,
            study,
            corpus,
            work_dir=work,
            results=arguments.results,
            device=device(arguments.cpu),
            at_once=arguments.at_once,
            methods=arguments.methods,
        )
        return report.section(arguments.what, study, records)

    return exit_status(action, work)


if __name__ == "__main__":
    sys.exit(main())
