"""``spectral-fairseq analyze``: what training did to the embedding space of a model."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

from spectral_fairseq.analysis.options import PROJECTIONS, SHARES, Options
from spectral_fairseq.checkpoints.saved import model_file
from spectral_fairseq.commands.arguments import Rare, add_format, add_no_progress, add_no_verify
from spectral_fairseq.commands.importing import import_plugin
from spectral_fairseq.commands.progress import CheckpointBar, checkpoints_bar
from spectral_fairseq.errors import (
    CheckpointError,
    arguments_as_flags,
    check_count,
    check_range,
    idle_flag,
    printable,
)
from spectral_fairseq.files import check_directory
from spectral_fairseq.formats import known
from spectral_fairseq.options import flag_of

if TYPE_CHECKING:
    from spectral_fairseq.analysis.api import Report

_SUBSET, _TOKENS, _TOKENIZER = "valid", 4096, "none"

DESCRIPTION = f"""\
Measure the table of word vectors of a model: isotropy, singular values, cosines, row norms,
neighbours. The model may be {known()}.
Of several tables, the one of the output layer is measured unless --table names another.
Files are read without executing what they contain. With --out, a folder is written with
pictures (PNG, SVG), the raw JSON and report.html, one page that needs no network.
Example: spectral-fairseq analyze checkpoint_best.pt --out report
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the models, and what is measured of them."""
    add_report_arguments(parser, "MODEL", "file or folder of a model or a table")


def add_report_arguments(parser: argparse.ArgumentParser, metavar: str, named: str) -> None:
    """Add the arguments that ``analyze`` and ``compare`` share.

    Args:
        parser: of the subcommand.
        metavar: name of the models in the usage.
        named: what names a model.
    """
    add = parser.add_argument
    add("checkpoints", nargs="+", metavar=metavar, help=named)
    add("--all", action="store_true", help="print every measure, not only four beside the verdict")
    add("--out", metavar="DIR", help="write report.html, pictures and JSON to this folder")
    add("--overwrite", action="store_true", help="replace a report that is already in DIR")
    add_format(parser)
    add(
        "--table",
        "--tensor",
        metavar="NAME",
        help="measure this table or matrix, given by its name or a part of it, instead of the "
        "output table",
    )
    add(
        "--dict",
        dest="dictionary",
        metavar="PATH",
        help="read words from this dict.txt, tokenizer.json, vocab.json, vocab.txt, sentencepiece "
        "model or its .vocab, or lines '<token> <row>', or from a folder with one (default: look "
        "where the checkpoint was trained, or beside the model)",
    )
    add(
        "--counts",
        metavar="FILE",
        help="read word frequencies from lines '<word> <count>', from a JSON object, or from one "
        "number for each row (text, JSON or .npy); dict.txt has its own",
    )
    _add_options(parser)
    _add_predictions(
        parser.add_argument_group("predictions", "fairseq builds the model and runs it on data")
    )
    add_no_progress(parser)
    add_no_verify(parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of :class:`Options`."""
    add = parser.add_argument
    add("--seed", type=int, default=Options.seed, help=Rare("seed of all random samples"))
    for name, text in (
        (
            "isotropy_words",
            "measure I1 and I2 on random samples of N words, as the papers do for language models "
            "(N = 40000 there); 0 takes all words at once, or one such sample of a huge table",
        ),
        ("isotropy_runs", "number of samples whose I1 and I2 are averaged"),
        ("cosine_words", "compute the distribution of cosines from the pairs of N random words"),
        ("projection_words", "draw N random words in the projection"),
    ):
        default = getattr(Options, name)
        add(flag_of(name), type=int, default=default, metavar="N", help=Rare(text))
    add(
        "--projection",
        choices=PROJECTIONS,
        default=Options.projection,
        help=Rare(
            "project the words on the first two singular vectors (svd), or on the first two "
            "principal components, which subtracts the mean first (pca)"
        ),
    )
    add(
        "--neighbours",
        type=int,
        default=Options.neighbours,
        metavar="N",
        help=Rare("list N nearest neighbours of each word of --words"),
    )
    add(
        "--words",
        nargs="+",
        default=Options.words,
        metavar="WORD",
        help="list the nearest neighbours of these words",
    )


def _add_predictions(group: Any) -> None:
    """Add what is measured on data."""
    add = group.add_argument
    add(
        "--data",
        metavar="DIR",
        help="folder of binarised data, on which rank and pairwise KL of log P are measured",
    )
    add(
        "--gen-subset",
        default=_SUBSET,
        metavar="NAME",
        help=Rare("subset of DIR to run the model on"),
    )
    add(
        "--tokens",
        type=int,
        default=_TOKENS,
        metavar="N",
        help="use the first N target tokens of the subset; the paper on mixtures of softmaxes uses "
        "the whole test set of Penn Treebank",
    )
    add(
        "--nbest",
        nargs="+",
        default=(),
        metavar="FILE",
        help=Rare(
            "measure precision and recall of sentence-level BLEU on the output of fairseq-generate "
            "--nbest, one file for each checkpoint"
        ),
    )
    add(
        "--nbest-tokenize",
        default=_TOKENIZER,
        metavar="NAME",
        help=Rare(
            "tokenise --nbest with this tokeniser of sacrebleu (default: none, for text that is "
            "tokenised already)"
        ),
    )


def run(args: argparse.Namespace) -> int:
    """Measure the named checkpoints; returns the exit status 0."""
    return measure_and_print(args, [Path(name) for name in args.checkpoints], "analyze")


_FLAGS = {field.name: flag_of(field.name) for field in fields(Options)}


@arguments_as_flags(dictionary="--dict", **_FLAGS)
def measure_and_print(args: argparse.Namespace, paths: Sequence[Path], command: str) -> int:
    """Measure, print, and write the folder if asked; returns the exit status 0."""
    options = Options(**{field.name: getattr(args, field.name) for field in fields(Options)})
    check_range("--tokens", args.tokens, at_least=1, whole=True)
    if args.nbest:
        what = "files of --nbest, one for each checkpoint"
        check_count(len(args.nbest), len(paths), what, "Give them in the order of the checkpoints.")
    _check_flags(args)
    for path in paths:
        model_file(path)
    if args.data:
        _check_data(args.data, paths)
        import_plugin()
    from spectral_fairseq.analysis.drawing import import_matplotlib
    from spectral_fairseq.analysis.results_folder import check_folder, check_inputs_stay

    if args.out is not None:
        folder = check_folder(args.out, args.overwrite)
        beside = [name for name in (args.dictionary, args.counts) if name]
        check_inputs_stay(folder, [*paths, *beside, *args.nbest])
        import_matplotlib()
    report = _measure(args, paths, options)
    report.command = command
    page = None if args.out is None else report.write(args.out, args.overwrite)
    if args.format == "json":
        print(json.dumps(report.to_dict()))
    else:
        print(report.to_text() if args.all else report)
    if page is not None:
        print(printable(f"Report: {page}"), file=sys.stderr)
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse flags that would do nothing."""
    for name, usual, needed in (
        ("overwrite", False, "out"),
        ("tokens", _TOKENS, "data"),
        ("gen_subset", _SUBSET, "data"),
        ("nbest_tokenize", _TOKENIZER, "nbest"),
        ("neighbours", Options.neighbours, "words"),
        ("isotropy_runs", Options.isotropy_runs, "isotropy_words"),
        ("projection", Options.projection, "out"),
        ("projection_words", Options.projection_words, "out"),
    ):
        if getattr(args, name) != usual and not getattr(args, needed):
            raise idle_flag(flag_of(name), flag_of(needed))


def _check_data(data: str, paths: Sequence[Path]) -> None:
    """Refuse what fairseq could not run, before the tables are measured."""
    from spectral_fairseq.formats.opening import may_be_torch_file

    check_directory(data, "a folder of binarised data", "Correct --data.")
    for path in paths:
        if not may_be_torch_file(path):
            wanted = f"a checkpoint of fairseq for --data at {path}"
            remedy = "Leave out --data, which measures what fairseq computes with the model."
            raise CheckpointError(wanted, "a model of another format", remedy)


def _measure(args: argparse.Namespace, paths: Sequence[Path], options: Options) -> Report:
    from spectral_fairseq.analysis import analyze
    from spectral_fairseq.analysis.results import labels_for
    from spectral_fairseq.commands.nbest import check_tokenizer, read_generated
    from spectral_fairseq.provenance import Noted

    read = [Noted.of(model_file(path)) for path in paths]
    labels = labels_for(paths)
    # What can fail does so before any long work.
    nbest = [read_generated(name) for name in args.nbest]
    if nbest:
        check_tokenizer(args.nbest_tokenize)
    unused = {"predictions": not args.data, "BLEU of the n best": not nbest}
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
            **vars(options),
        )
        for index, path in enumerate(paths):
            steps = progress(index)
            if args.data:
                _add_outputs(report, index, path, args, steps)
                read[index].check()
            if nbest:
                _add_nbest(report, index, nbest[index], args, steps)
            steps.end()
    return report


def _add_outputs(
    report: Report, index: int, path: Path, args: argparse.Namespace, steps: CheckpointBar
) -> None:
    """Add the measures of what a model computes on ``--data``."""
    from spectral_fairseq.commands.predictions import measure_outputs

    # The spectrum of the collected rows comes after the last of them.
    steps.begin("predictions", 1.3 * args.tokens)
    measures, details = measure_outputs(
        path, args.data, args.gen_subset, args.tokens, steps.advance
    )
    report.extend(index, measures, outputs=details)


def _add_nbest(
    report: Report, index: int, contexts: Any, args: argparse.Namespace, steps: CheckpointBar
) -> None:
    """Add the measures of a model's translations in ``--nbest``."""
    from spectral_fairseq.commands.nbest import ORDERS, bleu_details, nbest_bleu

    steps.begin("BLEU of the n best", len(ORDERS) * len(contexts))
    scores, signature = nbest_bleu(contexts, args.nbest_tokenize, progress=steps)
    report.extend(index, scores, nbest=bleu_details(contexts, signature, args.nbest[index]))
