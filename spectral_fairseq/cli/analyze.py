"""``spectral-fairseq analyze``: what training did to the embedding space of a checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, List, Sequence

from spectral_fairseq.analysis.callback import SHARES
from spectral_fairseq.analysis.options import Options
from spectral_fairseq.checkpoints.saved import checkpoint_file
from spectral_fairseq.cli.fairseq_plugin import import_plugin
from spectral_fairseq.cli.progress import CheckpointBar, checkpoints_bar
from spectral_fairseq.cli.verify import add_no_verify
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.options import add_flags, from_arguments

if TYPE_CHECKING:
    from spectral_fairseq.analysis.results import Analysed

DESCRIPTION = """\
Measure the table of word vectors of any fairseq checkpoint (plain, SVD or weight norm;
translation or language model): isotropy, singular values, cosines, row norms, neighbours.
Of several tables, the one of the output layer is measured unless --table names another.
Checkpoints are read without executing what they contain. With --out, a folder is written with
pictures (PNG, SVG), the raw JSON and report.html, one page that needs no network.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``analyze`` and ``compare`` share.

    Args:
        parser: of either.
    """
    parser.add_argument(
        "--out", metavar="DIR", help="write report.html, pictures and JSON to this folder"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a report that is already in DIR"
    )
    parser.add_argument(
        "--format",
        choices=("text", "json", "latex"),
        default="text",
        help="format of the printed figures (default: %(default)s)",
    )
    parser.add_argument(
        "--table",
        metavar="NAME",
        help="measure this table, given by its module's name or a part of it, instead of the "
        "output table",
    )
    parser.add_argument(
        "--dict",
        metavar="PATH",
        dest="dictionary",
        help="read words and their frequencies from this dict.txt or folder of binarised data "
        "(default: look where the checkpoint was trained)",
    )
    parser.add_argument(
        "--labels", metavar="A,B,...", help="names of the checkpoints, separated by commas"
    )
    add_flags(parser, Options)
    data = parser.add_argument_group("predictions", "fairseq builds the model and runs it on data")
    data.add_argument(
        "--data",
        metavar="DIR",
        help="folder of binarised data, on which rank and pairwise KL of log P are measured",
    )
    data.add_argument(
        "--gen-subset",
        metavar="NAME",
        default="valid",
        help="subset of DIR to run the model on (default: %(default)s)",
    )
    data.add_argument(
        "--tokens",
        metavar="N",
        type=int,
        default=4096,
        help="use the first N contexts of the subset; the paper takes all of PTB's "
        "(default: %(default)s)",
    )
    data.add_argument(
        "--nbest",
        metavar="FILE",
        nargs="+",
        default=[],
        help="measure precision and recall of sentence-level BLEU on the output of "
        "fairseq-generate --nbest, one file for each checkpoint",
    )
    data.add_argument(
        "--nbest-tokenize",
        metavar="NAME",
        default="none",
        help="tokenise --nbest with this tokeniser of sacrebleu (default: %(default)s, for text "
        "that is tokenised already)",
    )
    parser.add_argument(
        "--no-progress", action="store_true", help="show no progress bar (terminals only)"
    )
    add_no_verify(parser)


class _PrintSchema(argparse.Action):
    """Print the schema and exit, whatever else is on the command line."""

    def __call__(self, parser: Any, *_: Any) -> None:
        from spectral_fairseq.analysis.schema import DOCUMENT

        print(json.dumps(DOCUMENT, indent=2))
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``analyze``.

    Args:
        parser: of the subcommand.
    """
    parser.add_argument(
        "checkpoints", metavar="CKPT", nargs="+", help="checkpoint saved by fairseq-train"
    )
    add_options(parser)
    parser.add_argument(
        "--schema", action=_PrintSchema, nargs=0, help="print the JSON's schema and exit"
    )


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
        args: parsed arguments, with the options of :func:`add_options`.
        paths: the checkpoints.
        command: the subcommand's name.

    Returns:
        Exit status 0.

    Raises:
        ConfigurationError: options that contradict each other.
    """
    if args.nbest and len(args.nbest) != len(paths):
        raise ConfigurationError(
            f"one --nbest file for each of {len(paths)} checkpoints",
            str(len(args.nbest)),
            "Give them in the order of the checkpoints.",
        )
    options = from_arguments(Options, args)
    options.check()
    for path in paths:
        checkpoint_file(path)
    if args.data:
        import_plugin()
    from spectral_fairseq.analysis.plots import draw_all, matplotlib_pyplot
    from spectral_fairseq.analysis.render import as_latex, as_text
    from spectral_fairseq.analysis.results import document, labels_for
    from spectral_fairseq.analysis.write import PAGE, check_folder, write_results

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


def _analyse(
    args: argparse.Namespace, paths: Sequence[Path], labels: Sequence[str], options: Options
) -> List[Analysed]:
    from spectral_fairseq.analysis.results import analyse_checkpoint
    from spectral_fairseq.analysis.sentence_bleu import (
        ORDERS,
        bleu_details,
        nbest_bleu,
        read_generated,
    )

    nbest = [read_generated(name) for name in args.nbest]  # fails before any long work
    unused = {"predictions": not args.data, "BLEU of the n best": not nbest}
    total = len(paths) * sum(share for name, share in SHARES.items() if not unused.get(name))
    found: List[Analysed] = []
    with checkpoints_bar(args.no_progress, total) as bar:
        for index, (path, label) in enumerate(zip(paths, labels)):
            place = f" ({index + 1}/{len(paths)})" if len(paths) > 1 else ""
            progress = CheckpointBar(bar, label + place)
            one = analyse_checkpoint(
                path,
                options,
                label=label,
                table=args.table,
                dictionary=args.dictionary,
                progress=progress,
                verify=args.verify,
            )
            if args.data:
                from spectral_fairseq.tools.model_outputs import measure_outputs

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
