"""``spectral-fairseq analyze``: what training did to the embedding space of a model."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Sequence

from spectral_fairseq.analysis.options import SHARES, Options
from spectral_fairseq.checkpoints.saved import model_path
from spectral_fairseq.commands.shared import (
    CheckpointBar,
    add_no_verify,
    checkpoints_bar,
    import_plugin,
)
from spectral_fairseq.errors import CheckpointError, ConfigurationError, MissingDataError
from spectral_fairseq.options import add_flags, from_arguments

if TYPE_CHECKING:
    from spectral_fairseq.analysis.api import Report


TOKENS = 4096
# Flags that do nothing without another one.
_NEEDS = {
    "--overwrite": "--out",
    "--tokens": "--data",
    "--gen-subset": "--data",
    "--nbest-tokenize": "--nbest",
}

DESCRIPTION = """\
Measure the table of word vectors of a model: isotropy, singular values, cosines, row norms,
neighbours. The model may be a fairseq checkpoint (with a plain or a factored table; of translation
or a language model), a state dict of torch, a safetensors file, the folder of a Hugging Face model,
an array of numpy (.npy, .npz), or word vectors of word2vec, fastText or GloVe.
Of several tables, the one of the output layer is measured unless --table names another.
Files are read without executing what they contain. With --out, a folder is written with
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
        choices=("text", "json"),
        default="text",
        help="format of the printed figures (default: %(default)s)",
    )
    parser.add_argument(
        "--table",
        "--tensor",
        metavar="NAME",
        help="measure this table or matrix, given by its name or a part of it, instead of the "
        "output table",
    )
    parser.add_argument(
        "--dict",
        metavar="PATH",
        dest="dictionary",
        help="read words from this dict.txt, tokenizer.json, vocab.json, vocab.txt or "
        "sentencepiece model, or from a folder with one (default: look where the checkpoint was "
        "trained, or beside the model)",
    )
    parser.add_argument(
        "--counts",
        metavar="FILE",
        help="read word frequencies from lines '<word> <count>', from a JSON object, or from one "
        "number for each row (text or .npy); dict.txt has its own",
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
        "--gen-subset", metavar="NAME", help="subset of DIR to run the model on (default: valid)"
    )
    data.add_argument(
        "--tokens",
        metavar="N",
        type=int,
        help="use the first N target tokens of the subset; the paper on mixtures of softmaxes uses "
        f"the whole test set of Penn Treebank (default: {TOKENS})",
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
        help="tokenise --nbest with this tokeniser of sacrebleu (default: none, for text that is "
        "tokenised already)",
    )
    parser.add_argument(
        "--no-progress", action="store_true", help="show no progress bar (terminals only)"
    )
    add_no_verify(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``analyze``.

    Args:
        parser: of the subcommand.
    """
    parser.add_argument(
        "checkpoints", metavar="MODEL", nargs="+", help="file or folder of a model or a table"
    )
    parser.add_argument(
        "--all", action="store_true", help="print every measure, not only six beside the verdict"
    )
    add_options(parser)


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
    _check_flags(args)
    options = from_arguments(Options, args)
    options.check()
    for path in paths:
        model_path(path)
    if args.data:
        _check_data(args, paths)
        import_plugin()
    from spectral_fairseq.analysis.plots import import_matplotlib
    from spectral_fairseq.analysis.report import check_folder, check_inputs_stay

    if args.out is not None:
        folder = check_folder(args.out, args.overwrite)
        beside = [name for name in (args.dictionary, args.counts) if name]
        check_inputs_stay(folder, [*paths, *beside, *args.nbest])
        import_matplotlib()
    report = _analyse(args, paths, options)
    report.command = command
    page = None if args.out is None else report.write(args.out, args.overwrite)
    if args.format == "json":
        print(json.dumps(report.to_dict()))
    else:
        print(report.to_text() if getattr(args, "all", False) else report)
    if page is not None:
        print(f"Report: {page}", file=sys.stderr)
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse flags that would do nothing, and fill in what was not given."""
    for flag, needed in _NEEDS.items():
        name, other = (one[2:].replace("-", "_") for one in (flag, needed))
        if getattr(args, name) not in (None, False) and not getattr(args, other):
            raise ConfigurationError(
                f"{needed} together with {flag}", "no such flag", f"Add {needed}, or remove {flag}."
            )
    args.gen_subset = args.gen_subset or "valid"
    args.nbest_tokenize = args.nbest_tokenize or "none"
    args.tokens = TOKENS if args.tokens is None else args.tokens


def _check_data(args: argparse.Namespace, paths: Sequence[Path]) -> None:
    """Refuse what fairseq could not run, before the tables are measured.

    Raises:
        ConfigurationError: a number of tokens below one.
        MissingDataError: no such folder.
        CheckpointError: a model that is not a checkpoint of fairseq.
    """
    from spectral_fairseq.checkpoints.models import may_be_torch_file

    if args.tokens < 1:
        raise ConfigurationError("--tokens of 1 or more", str(args.tokens), "Give more tokens.")
    if not os.path.isdir(args.data):
        raise MissingDataError(
            f"a folder at {args.data}", "none", "Name a folder of binarised data with --data."
        )
    for path in paths:
        if not may_be_torch_file(path):
            raise CheckpointError(
                f"a checkpoint of fairseq for --data at {path}",
                "a model of another format",
                "Leave out --data, which measures what fairseq computes with the model.",
            )


def _analyse(args: argparse.Namespace, paths: Sequence[Path], options: Options) -> Report:
    from spectral_fairseq.analysis import analyze
    from spectral_fairseq.analysis.results import labels_for
    from spectral_fairseq.commands.nbest import (
        ORDERS,
        bleu_details,
        check_tokenizer,
        nbest_bleu,
        read_generated,
    )

    labels = labels_for(paths, None if args.labels is None else args.labels.split(","))
    methods = getattr(args, "methods", None)
    # What can fail does so before any long work.
    nbest = [read_generated(name) for name in args.nbest]
    if nbest:
        check_tokenizer(args.nbest_tokenize)
    unused = {
        "predictions": not args.data,
        "BLEU of the n best": not nbest,
        "drift": len(paths) == 1,
    }
    total = len(paths) * sum(share for name, share in SHARES.items() if not unused.get(name))
    with checkpoints_bar(args.no_progress, total) as bar:

        def progress(index: int) -> CheckpointBar:
            place = f" ({index + 1}/{len(paths)})" if len(paths) > 1 else ""
            return CheckpointBar(bar, labels[index] + place)

        report = analyze(
            *paths,
            table=args.table,
            dictionary=args.dictionary,
            counts=args.counts,
            labels=labels,
            verify=args.verify,
            progress=progress,
            methods=methods.split(",") if methods else None,
            **vars(options),
        )
        for index, path in enumerate(paths):
            steps = progress(index)
            if args.data:
                from spectral_fairseq.commands.predictions import measure_outputs

                # The spectrum of the collected rows comes after the last of them.
                steps.begin("predictions", 1.3 * args.tokens)
                measures, details = measure_outputs(
                    path, args.data, args.gen_subset, args.tokens, steps.advance
                )
                report.extend(index, measures, outputs=details)
            if nbest:
                steps.begin("BLEU of the n best", len(ORDERS) * len(nbest[index]))
                scores, signature = nbest_bleu(nbest[index], args.nbest_tokenize, progress=steps)
                details = bleu_details(nbest[index], signature, args.nbest[index])
                report.extend(index, scores, nbest=details)
            steps.end()
    return report
