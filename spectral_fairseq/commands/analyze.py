"""``spectral-fairseq analyze``: what training did to the embedding space of a model."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Sequence, Tuple

from spectral_fairseq.analysis.options import SHARES, Options
from spectral_fairseq.checkpoints.saved import model_file
from spectral_fairseq.commands.importing import import_plugin
from spectral_fairseq.commands.progress import CheckpointBar, checkpoints_bar
from spectral_fairseq.commands.shared import no_verify
from spectral_fairseq.errors import CheckpointError, check_count, idle_flag
from spectral_fairseq.files import check_directory
from spectral_fairseq.formats import known
from spectral_fairseq.options import option, part

if TYPE_CHECKING:
    from spectral_fairseq.analysis.api import Report


# Flags that do nothing without another one.
_NEEDS = {
    "--overwrite": "--out",
    "--tokens": "--data",
    "--gen-subset": "--data",
    "--nbest-tokenize": "--nbest",
}

DESCRIPTION = f"""\
Measure the table of word vectors of a model: isotropy, singular values, cosines, row norms,
neighbours. The model may be {known()}.
Of several tables, the one of the output layer is measured unless --table names another.
Files are read without executing what they contain. With --out, a folder is written with
pictures (PNG, SVG), the raw JSON and report.html, one page that needs no network.
Example: spectral-fairseq analyze checkpoint_best.pt --out report
"""


@dataclass
class PredictionArguments:
    """What is measured on data."""

    data: Optional[str] = option(
        None,
        "folder of binarised data, on which rank and pairwise KL of log P are measured",
        metavar="DIR",
    )
    gen_subset: str = option(
        "valid", "subset of DIR to run the model on", metavar="NAME", rare=True
    )
    tokens: int = option(
        4096,
        "use the first N target tokens of the subset; the paper on mixtures of softmaxes uses the "
        "whole test set of Penn Treebank",
        metavar="N",
        at_least=1,
    )
    nbest: Tuple[str, ...] = option(
        (),
        "measure precision and recall of sentence-level BLEU on the output of fairseq-generate "
        "--nbest, one file for each checkpoint",
        metavar="FILE",
        rare=True,
    )
    nbest_tokenize: str = option(
        "none",
        "tokenise --nbest with this tokeniser of sacrebleu (default: none, for text that is "
        "tokenised already)",
        metavar="NAME",
        rare=True,
    )


@dataclass
class ReportArguments:
    """The arguments that ``analyze`` and ``compare`` share."""

    all: bool = option(False, "print every measure, not only four beside the verdict")
    out: Optional[str] = option(
        None, "write report.html, pictures and JSON to this folder", metavar="DIR"
    )
    overwrite: bool = option(False, "replace a report that is already in DIR")
    format: str = option("text", "format of the printed figures", choices=("text", "json"))
    table: Optional[str] = option(
        None,
        "measure this table or matrix, given by its name or a part of it, instead of the output "
        "table",
        alias="--tensor",
        metavar="NAME",
    )
    dictionary: Optional[str] = option(
        None,
        "read words from this dict.txt, tokenizer.json, vocab.json, vocab.txt or sentencepiece "
        "model, or from a folder with one (default: look where the checkpoint was trained, or "
        "beside the model)",
        flag_name="dict",
        metavar="PATH",
    )
    counts: Optional[str] = option(
        None,
        "read word frequencies from lines '<word> <count>', from a JSON object, or from one "
        "number for each row (text or .npy); dict.txt has its own",
        metavar="FILE",
    )
    measuring: Options = part(Options)
    predictions: PredictionArguments = part(
        PredictionArguments, "predictions", "fairseq builds the model and runs it on data"
    )
    no_progress: bool = option(False, "show no progress bar (terminals only)", rare=True)
    verify: bool = no_verify()


@dataclass
class Arguments:
    """The arguments of ``analyze``."""

    checkpoints: Tuple[str, ...] = option(
        (), "file or folder of a model or a table", metavar="MODEL", positional=True
    )
    report: ReportArguments = part(ReportArguments)


def run(args: Arguments) -> int:
    """Measure the named checkpoints; returns the exit status 0."""
    paths = [Path(name) for name in args.checkpoints]
    return report(args.report, paths, "analyze")


def report(args: ReportArguments, paths: Sequence[Path], command: str) -> int:
    """Measure, print, and write the folder if asked; returns the exit status 0."""
    nbest = args.predictions.nbest
    if nbest:
        what = "files of --nbest, one for each checkpoint"
        check_count(len(nbest), len(paths), what, "Give them in the order of the checkpoints.")
    _check_flags(args)
    for path in paths:
        model_file(path)
    if args.predictions.data:
        _check_data(args.predictions.data, paths)
        import_plugin()
    from spectral_fairseq.analysis.drawing import import_matplotlib
    from spectral_fairseq.analysis.report import check_folder, check_inputs_stay

    if args.out is not None:
        folder = check_folder(args.out, args.overwrite)
        beside = [name for name in (args.dictionary, args.counts) if name]
        check_inputs_stay(folder, [*paths, *beside, *args.predictions.nbest])
        import_matplotlib()
    analysis = _analyse(args, paths)
    analysis.command = command
    page = None if args.out is None else analysis.write(args.out, args.overwrite)
    if args.format == "json":
        print(json.dumps(analysis.to_dict()))
    else:
        print(analysis.to_text() if args.all else analysis)
    if page is not None:
        print(f"Report: {page}", file=sys.stderr)
    return 0


def _check_flags(args: ReportArguments) -> None:
    """Refuse flags that would do nothing."""
    values = {**vars(args), **vars(args.predictions)}
    defaults = {**vars(ReportArguments()), **vars(PredictionArguments())}
    for flag, needed in _NEEDS.items():
        name, other = (text[2:].replace("-", "_") for text in (flag, needed))
        if values[name] != defaults[name] and not values[other]:
            raise idle_flag(flag, needed)


def _check_data(data: str, paths: Sequence[Path]) -> None:
    """Refuse what fairseq could not run, before the tables are measured."""
    from spectral_fairseq.formats.opening import may_be_torch_file

    check_directory(data, "a folder of binarised data", "Correct --data.")
    for path in paths:
        if not may_be_torch_file(path):
            wanted = f"a checkpoint of fairseq for --data at {path}"
            remedy = "Leave out --data, which measures what fairseq computes with the model."
            raise CheckpointError(wanted, "a model of another format", remedy)


def _analyse(args: ReportArguments, paths: Sequence[Path]) -> Report:
    from spectral_fairseq.analysis import analyze
    from spectral_fairseq.analysis.results import labels_for
    from spectral_fairseq.commands.nbest import (
        ORDERS,
        bleu_details,
        check_tokenizer,
        nbest_bleu,
        read_generated,
    )

    asked = args.predictions
    labels = labels_for(paths)
    # What can fail does so before any long work.
    nbest = [read_generated(name) for name in asked.nbest]
    if nbest:
        check_tokenizer(asked.nbest_tokenize)
    unused = {
        "predictions": not asked.data,
        "BLEU of the n best": not nbest,
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
            **vars(args.measuring),
        )
        for index, path in enumerate(paths):
            steps = progress(index)
            if asked.data:
                from spectral_fairseq.commands.predictions import measure_outputs

                # The spectrum of the collected rows comes after the last of them.
                steps.begin("predictions", 1.3 * asked.tokens)
                measures, details = measure_outputs(
                    path,
                    asked.data,
                    asked.gen_subset,
                    asked.tokens,
                    steps.advance,
                )
                report.extend(index, measures, outputs=details)
            if nbest:
                steps.begin("BLEU of the n best", len(ORDERS) * len(nbest[index]))
                scores, signature = nbest_bleu(nbest[index], asked.nbest_tokenize, progress=steps)
                details = bleu_details(nbest[index], signature, asked.nbest[index])
                report.extend(index, scores, nbest=details)
            steps.end()
    return report
