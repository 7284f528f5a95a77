"""``spectral-fairseq evaluate-lm``: exact perplexity, static, cached or adapting."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Dict, List, Optional

from spectral_fairseq.checkpoints.saved import checkpoint_file
from spectral_fairseq.commands.arguments import Rare, add_format, add_no_progress, add_no_verify
from spectral_fairseq.commands.importing import import_plugin
from spectral_fairseq.commands.lm_options import add_options, options_of
from spectral_fairseq.commands.progress import StageBars
from spectral_fairseq.errors import printable
from spectral_fairseq.options import FLOAT32_PRODUCTS

DESCRIPTION = """\
Perplexity of a language model that carries a state (awd_lstm_*, transformer_xl_*) on a split that
fairseq-preprocess --only-source binarised: every token once, ends of sentences included, in memory
that does not depend on the length of the split. The model reads --streams contiguous parts of the
split, --segment tokens at a time, as in training. All other language models are evaluated by
fairseq-eval-lm.
Example: spectral-fairseq evaluate-lm checkpoint.pt data-bin --gen-subset test
"""

# What the papers call the numbers that are searched.
_SYMBOLS = {"rate": "eta", "decay": "lambda"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint, the data, and what :func:`add_options` adds."""
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help="checkpoint saved by fairseq-train")
    add("data", metavar="DATA", help="folder of binarised data")
    add_options(parser)
    add_format(parser)
    add_no_progress(parser)
    add(
        FLOAT32_PRODUCTS.flag,
        choices=FLOAT32_PRODUCTS.choices,
        default=FLOAT32_PRODUCTS.default,
        help=Rare(FLOAT32_PRODUCTS.help),
    )
    add_no_verify(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate one checkpoint; returns the exit status 0."""
    options = options_of(args)
    options.check()
    checkpoint_file(args.checkpoint)
    import_plugin()
    from spectral_fairseq.commands.lm_evaluation import evaluate_checkpoint
    from spectral_fairseq.functional.float32_products import float32_products

    with float32_products(args.float32_products), StageBars(args.no_progress) as bars:
        document = evaluate_checkpoint(args.checkpoint, args.data, options, bars.begin, args.verify)
    if document["data"]["remark"]:
        print(printable(f"warning: {document['data']['remark']}"), file=sys.stderr)
    print(json.dumps(document) if args.format == "json" else printable(as_text(document)))
    return 0


def as_text(document: Dict[str, Any]) -> str:
    """The document as plain text: the grids, then a table of the figures and their signatures."""
    from tabulate import tabulate

    parts = [_grid(search) for search in document["tuning"]]
    rows = [
        [
            figure["method"],
            f"{figure['tokens']:,}",
            "-" if figure["bits"] is None else f"{figure['bits']:.4f}",
            _shown(figure["perplexity"]),
        ]
        for figure in document["figures"]
    ]
    headers = ["", "tokens", "bits", "perplexity"]
    align = ("left", "right", "right", "right")
    parts.append(tabulate(rows, headers, disable_numparse=True, colalign=align))
    parts.append(
        "\n".join(f"{figure['method']}: {figure['signature']}" for figure in document["figures"])
    )
    return "\n\n".join(parts)


def _grid(search: Dict[str, Any]) -> str:
    """A table of perplexities: the first number searched down, the second across."""
    from tabulate import tabulate

    down, across = [name for name in search["points"][0] if name != "perplexity"]
    perplexities = {(point[down], point[across]): point["perplexity"] for point in search["points"]}
    best = search["best"]
    rows_of, columns_of = (sorted({place[axis] for place in perplexities}) for axis in (0, 1))
    rows: List[List[str]] = []
    for value in rows_of:
        cells = []
        for column in columns_of:
            mark = "*" if (value, column) == (best[down], best[across]) else ""
            cells.append(_shown(perplexities[value, column]) + mark)
        rows.append([f"{value:g}", *cells])
    down_name, across_name = _SYMBOLS.get(down, down), _SYMBOLS.get(across, across)
    headers = [f"{down_name} \\ {across_name}", *(f"{column:g}" for column in columns_of)]
    lines = [
        f"{search['method']}: perplexity on {search['subset']}, {search['tokens']:,} tokens",
        tabulate(rows, headers, disable_numparse=True, colalign=("right",) * len(headers)),
        f"best (*): {down_name} {best[down]:g}, {across_name} {best[across]:g}, "
        f"perplexity {_shown(best['perplexity'])}",
    ]
    for name, end in search["ends"].items():
        flag = f"--tune-{search['method']}-{name}"
        lines.append(
            f"note: {_SYMBOLS.get(name, name)} {best[name]:g} is the {end} value searched; a "
            f"better one may lie beyond it ({flag})"
        )
    return "\n".join(lines)


def _shown(value: Optional[float]) -> str:
    return "infinite" if value is None else f"{value:.2f}"
