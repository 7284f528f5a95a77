"""``spectral-fairseq analyze``: what training did to the embedding space of a checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, List, Sequence

from tqdm import tqdm

from spectral_fairseq.analysis.measures import Options
from spectral_fairseq.analysis.plots import draw_all, matplotlib_pyplot
from spectral_fairseq.analysis.progress import SHARES, Progress
from spectral_fairseq.analysis.render import as_latex, as_text
from spectral_fairseq.analysis.results import Analysed, analyse_checkpoint, document, labels_for
from spectral_fairseq.analysis.schema import DOCUMENT
from spectral_fairseq.analysis.sentence_bleu import ORDERS, bleu_details, nbest_bleu, read_generated
from spectral_fairseq.analysis.write import PAGE, check_folder, write_results
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.tools.model_outputs import measure_outputs

DESCRIPTION = """\
Measure the table of word vectors of any fairseq checkpoint (plain, SVD or weight norm;
translation or language model): isotropy, singular values, cosines, row norms, neighbours.
Checkpoints are read without executing what they contain. With --out, a folder is written with
pictures (PNG, SVG), the raw JSON and report.html, one page that needs no network.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``analyze`` and ``compare`` share.

    Args:
        parser: of either.
    """
    default = Options()
    parser.add_argument("--out", metavar="DIR", help="write report.html, pictures and JSON there")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a report that is in DIR already"
    )
    parser.add_argument(
        "--format", choices=("text", "json", "latex"), default="text", help="of what is printed"
    )
    parser.add_argument(
        "--table", metavar="NAME",
        help="which table, where a checkpoint has several: its module's name or a part of it",
    )  # fmt: skip
    parser.add_argument(
        "--dict", metavar="PATH", dest="dictionary",
        help="dict.txt, or the folder of binarised data, for words and frequencies; looked for "
        "where the checkpoint was trained if not given",
    )  # fmt: skip
    parser.add_argument(
        "--labels", metavar="A,B,...", help="names of the checkpoints, separated by commas"
    )
    parser.add_argument(
        "--words",
        metavar="WORD",
        nargs="+",
        default=[],
        help="list the nearest neighbours of these",
    )
    parser.add_argument(
        "--neighbours", metavar="N", type=int, default=default.neighbours,
        help="neighbours of each (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--isotropy-words", metavar="N", type=int, default=default.isotropy_words,
        help="words of a random sample for I1 and I2; the paper's language model has 40000. "
        "0 takes all words (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--isotropy-runs", metavar="N", type=int, default=default.isotropy_runs,
        help="samples to average (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--cosine-words", metavar="N", type=int, default=default.cosine_words,
        help="words whose pairs make the distribution of cosines (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--projection", choices=("svd", "pca"), default=default.projection,
        help="project words on singular vectors, or on principal components (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--projection-words", metavar="N", type=int, default=default.projection_words,
        help="words to draw (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=default.seed, help="of all samples (%(default)s)"
    )
    data = parser.add_argument_group("predictions", "the model is built by fairseq and run on data")
    data.add_argument("--data", metavar="DIR", help="binarised data; measures rank and KL of log P")
    data.add_argument(
        "--gen-subset", metavar="NAME", default="valid", help="subset of DIR (%(default)s)"
    )
    data.add_argument(
        "--tokens", metavar="N", type=int, default=4096,
        help="contexts, the first ones of the subset (%(default)s; the paper takes all of PTB's)",
    )  # fmt: skip
    data.add_argument(
        "--nbest", metavar="FILE", nargs="+", default=[],
        help="output of fairseq-generate --nbest, one file for each checkpoint: precision and "
        "recall of sentence-level BLEU",
    )  # fmt: skip
    data.add_argument(
        "--nbest-tokenize", metavar="NAME", default="none",
        help="sacrebleu's tokeniser for --nbest (%(default)s, for tokenised text)",
    )  # fmt: skip
    parser.add_argument(
        "--no-progress", action="store_true", help="no progress bar (shown on terminals only)"
    )


class _PrintSchema(argparse.Action):
    """Print the schema and leave, whatever else is on the command line."""

    def __call__(self, parser: Any, *unused: Any) -> None:
        print(json.dumps(DOCUMENT, indent=2))
        parser.exit()


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``analyze``.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers`` returned.
    """
    parser = subparsers.add_parser(
        "analyze",
        help="measure and draw the embedding space of checkpoints",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoints", metavar="CKPT", nargs="+", help="saved by fairseq-train")
    add_options(parser)
    parser.add_argument(
        "--schema", action=_PrintSchema, nargs=0, help="print the JSON's schema and exit"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure the named checkpoints.

    Args:
        args: parsed arguments.

    Returns:
        Exit status 0; every failure is an error, and then nothing is written.
    """
    return report(args, [Path(name) for name in args.checkpoints], "analyze")


def report(args: argparse.Namespace, paths: Sequence[Path], command: str) -> int:
    """Measure, print, and write the folder if asked.

    Args:
        args: parsed arguments, those of :func:`add_options`.
        paths: the checkpoints.
        command: the subcommand's name.

    Returns:
        Exit status 0.

    Raises:
        ConfigurationError: options that contradict each other.
    """
    if args.nbest and len(args.nbest) != len(paths):
        raise ConfigurationError(
            f"one --nbest file for each of {len(paths)} checkpoints", str(len(args.nbest)),
            "Give them in the order of the checkpoints.",
        )  # fmt: skip
    options = _options(args)
    options.check()
    out = None
    if args.out is not None:
        out = check_folder(args.out, args.overwrite)
        matplotlib_pyplot()
    labels = labels_for(paths, args.labels.split(",") if args.labels else None)
    analysed = _analyse(args, paths, labels, options)
    found = document(command, analysed, options)
    if out is not None:
        write_results(out, found, draw_all(found, analysed))
    if args.format == "json":
        print(json.dumps(found))
    else:
        print(as_latex(found) if args.format == "latex" else as_text(found))
    if out is not None:
        print(f"Report: {out / PAGE}", file=sys.stderr)
    return 0


def _options(args: argparse.Namespace) -> Options:
    return Options(
        seed=args.seed,
        isotropy_words=args.isotropy_words,
        isotropy_runs=args.isotropy_runs,
        cosine_words=args.cosine_words,
        projection_words=args.projection_words,
        projection=args.projection,
        neighbours=args.neighbours,
        words=tuple(args.words),
    )


def _analyse(
    args: argparse.Namespace, paths: Sequence[Path], labels: Sequence[str], options: Options
) -> List[Analysed]:
    nbest = [read_generated(name) for name in args.nbest]  # fails before any long work
    unused = {"predictions": not args.data, "BLEU of the n best": not nbest}
    total = len(paths) * sum(share for name, share in SHARES.items() if not unused.get(name))
    disable = True if args.no_progress else None  # None: off where stderr is no terminal
    found: List[Analysed] = []
    with tqdm(
        total=total, disable=disable, file=sys.stderr, leave=False, dynamic_ncols=True,
        bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}",
    ) as bar:  # fmt: skip
        for index, (path, label) in enumerate(zip(paths, labels)):
            place = f" ({index + 1}/{len(paths)})" if len(paths) > 1 else ""
            progress = _Bar(bar, label + place)
            one = analyse_checkpoint(
                path,
                options,
                label=label,
                table=args.table,
                dictionary=args.dictionary,
                progress=progress,
            )
            if args.data:
                # The spectrum of the collected rows comes after the last of them.
                progress.begin("predictions", 1.3 * args.tokens)
                measures, details = measure_outputs(
                    path, args.data, args.gen_subset, args.tokens, progress.advance
                )
                one.result["measures"].update(measures)
                one.result["outputs"] = details
            if nbest:
                progress.begin("BLEU of the n best", len(ORDERS) * len(nbest[index]))
                scores, signature = nbest_bleu(nbest[index], args.nbest_tokenize, progress=progress)
                one.result["measures"].update(scores)
                one.result["nbest"] = bleu_details(nbest[index], signature, args.nbest[index])
            progress.end()
            found.append(one)
    return found


class _Bar(Progress):
    """One checkpoint's part of a bar over all of them.

    Args:
        bar: counts the shares of all steps of all checkpoints.
        label: of the checkpoint.
    """

    def __init__(self, bar: Any, label: str) -> None:
        self._bar = bar
        self._label = label
        self._per_unit = self._left = 0.0

    def begin(self, step: str, units: float = 1) -> None:
        self.end()
        self._bar.set_description_str(f"{self._label}: {step}")
        self._left = SHARES[step]
        self._per_unit = self._left / max(units, 1)

    def advance(self, units: float) -> None:
        done = min(units * self._per_unit, self._left)
        self._left -= done
        self._bar.update(done)

    def end(self) -> None:
        """The last step has ended."""
        self._bar.update(self._left)
        self._left = 0.0
