"""``spectral-fairseq evaluate-lm``: exact perplexity, plain, cached or adapting."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Dict, List, Optional

from tqdm import tqdm

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.tools.language_model_evaluation import (
    PUBLISHED,
    CacheOptions,
    DynamicOptions,
    Options,
    TuneOptions,
    evaluate_checkpoint,
)

DESCRIPTION = """\
Perplexity of a language model on a split that fairseq-preprocess --only-source binarised: every
token once, ends of sentences included, in memory that does not depend on the length of the split.

Models that carry a state (awd_lstm_*, transformer_xl_*) read --streams contiguous parts of the
split, --segment tokens at a time, as in training. All other language models of fairseq read
blocks of --segment tokens, of which --context-window repeat the block before: the figure is that
of fairseq-eval-lm --tokens-per-sample SEGMENT --context-window C.

  --cache     mixes in a continuous cache of the words seen last (Grave et al. 2017)
  --dynamic   lets the model learn from what it has been scored on (Krause et al. 2018)
  --tune      searches the numbers of both on the split "valid", never on another
"""


def _numbers(text: str) -> List[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers separated by commas, found {text!r}"
        ) from None


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``evaluate-lm``.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers`` returned.
    """
    parser = subparsers.add_parser(
        "evaluate-lm",
        help="perplexity of a language model, with cache and dynamic evaluation",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="saved by fairseq-train")
    parser.add_argument("data", metavar="DATA", help="folder of binarised data")
    parser.add_argument(
        "--gen-subset", metavar="NAME", default="valid", help="split to evaluate (%(default)s)"
    )
    parser.add_argument(
        "--streams", metavar="B", type=int, default=1,
        help="contiguous parts read side by side by a model with a state (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--segment", metavar="T", type=int,
        help="tokens at a time (those of the training; 5 with --dynamic and a state)",
    )  # fmt: skip
    parser.add_argument(
        "--context-window", metavar="C", type=int, default=0,
        help="of a block's tokens, those that repeat the block before (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--model-overrides", metavar="DICT", default="{}",
        help="settings of the checkpoint to replace, such as \"{'mem_len': 640}\"",
    )  # fmt: skip
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="of what is printed"
    )
    parser.add_argument("--cpu", action="store_true", help="leave a GPU alone")
    parser.add_argument(
        "--no-progress", action="store_true", help="no progress bar (shown on terminals only)"
    )
    _add_cache(parser)
    _add_dynamic(parser)
    _add_tuning(parser)
    parser.set_defaults(run=run)


def _add_cache(parser: argparse.ArgumentParser) -> None:
    default = CacheOptions()
    group = parser.add_argument_group(
        "cache", "published: WikiText-2 the defaults; PTB window 500, theta 1.0, lambda 0.1"
    )
    group.add_argument(
        "--cache", action="store_true", help="use a cache (as any of the following does)"
    )
    group.add_argument(
        "--cache-window", metavar="W", type=int, help=f"words that it holds ({default.window})"
    )
    group.add_argument(
        "--cache-theta", metavar="THETA", type=float,
        help=f"how much alike two states must be ({default.theta})",
    )  # fmt: skip
    group.add_argument(
        "--cache-lambda", metavar="LAMBDA", type=float,
        help=f"share of the cache in the mixture, in [0, 1) ({default.weight})",
    )  # fmt: skip


def _add_dynamic(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "dynamic evaluation", "published for AWD-LSTM: the defaults, with --segment 5"
    )
    group.add_argument(
        "--dynamic", action="store_true", help="use it (as any of the following does)"
    )
    for flag, metavar, key, meaning in (
        ("rate", "ETA", "rate", "learning rate"),
        ("decay", "LAMBDA", "decay", "mean rate of decay towards the trained weights"),
        ("epsilon", "EPS", "epsilon", "added to the root mean square of the gradient"),
    ):
        shown = getattr(PUBLISHED["mean"], key)
        group.add_argument(
            f"--dynamic-{flag}", metavar=metavar, type=float, help=f"{meaning} ({shown:g})"
        )
    group.add_argument(
        "--dynamic-units", choices=tuple(PUBLISHED),
        help="what the three numbers are for: the paper's means (default), or the sums of the "
        "method's first code, with defaults of their own: 0.002, 0.02, 0.001. Values for mixtures "
        "of softmaxes were published for sums: lambda 0.075 on PTB, epsilon 0.002 on WikiText-2",
    )  # fmt: skip
    group.add_argument(
        "--dynamic-batches", metavar="N", type=int,
        help="batches of the training split, for the statistics of its gradients (all); with "
        "few, words that are in none of them make steps of eta/epsilon",
    )  # fmt: skip
    group.add_argument(
        "--dynamic-batch-size", metavar="B", type=int,
        help="streams in each of those batches (100), or blocks of a model without a state (1)",
    )  # fmt: skip


def _add_tuning(parser: argparse.ArgumentParser) -> None:
    default = TuneOptions()
    group = parser.add_argument_group(
        "grid search", "on the split valid; the split evaluated then uses the best values"
    )
    group.add_argument(
        "--tune", action="store_true", help="search theta and lambda, eta and lambda"
    )
    group.add_argument(
        "--tune-tokens", metavar="N", type=int, help="search on the first N tokens of valid (all)"
    )
    for flag, shown in (
        ("cache-theta", _list(default.cache_thetas)),
        ("cache-lambda", _list(default.cache_weights)),
        ("dynamic-rate", "the authors' 6, scaled by SEGMENT/5"),
        ("dynamic-decay", "the authors' 4, scaled by SEGMENT/5"),
    ):
        group.add_argument(
            f"--tune-{flag}", metavar="A,B,...", type=_numbers, help=f"grid of --{flag} ({shown})"
        )


def _list(values: Any) -> str:
    return ",".join(f"{value:g}" for value in values)


def run(args: argparse.Namespace) -> int:
    """Evaluate one checkpoint.

    Args:
        args: parsed arguments.

    Returns:
        Exit status 0; every failure is an error.
    """
    with _Bars(args.no_progress) as bars:
        found = evaluate_checkpoint(args.checkpoint, args.data, options_of(args), bars.begin)
    if found["data"]["remark"]:
        print(f"warning: {found['data']['remark']}", file=sys.stderr)
    print(json.dumps(found) if args.format == "json" else as_text(found))
    return 0


def options_of(args: argparse.Namespace) -> Options:
    """What the parsed arguments ask for.

    Args:
        args: parsed arguments.

    Raises:
        ConfigurationError: options of --tune without it, or of a grid without its method.
    """
    cache = {
        "window": args.cache_window, "theta": args.cache_theta, "weight": args.cache_lambda
    }  # fmt: skip
    dynamic = {
        "rate": args.dynamic_rate, "decay": args.dynamic_decay, "epsilon": args.dynamic_epsilon,
        "units": args.dynamic_units, "batches": args.dynamic_batches,
        "batch_size": args.dynamic_batch_size,
    }  # fmt: skip
    tune = {
        "tokens": args.tune_tokens, "cache_thetas": args.tune_cache_theta,
        "cache_weights": args.tune_cache_lambda, "dynamic_rates": args.tune_dynamic_rate,
        "dynamic_decays": args.tune_dynamic_decay,
    }  # fmt: skip
    if not args.tune and _given(tune):
        raise ConfigurationError(
            "--tune with the options of the grid search", "these options alone", "Add --tune."
        )
    for method, asked, grid in (
        ("cache", args.cache or _given(cache), (args.tune_cache_theta, args.tune_cache_lambda)),
        (
            "dynamic",
            args.dynamic or _given(dynamic),
            (args.tune_dynamic_rate, args.tune_dynamic_decay),
        ),
    ):
        if not asked and grid != (None, None):
            raise ConfigurationError(
                f"--{method} with the options of its grid, --tune-{method}-...",
                "these options alone", f"Add --{method}, or leave them out.",
            )  # fmt: skip
    return Options(
        subset=args.gen_subset,
        streams=args.streams,
        segment=args.segment,
        context_window=args.context_window,
        overrides=args.model_overrides,
        cache=CacheOptions(**_given(cache)) if args.cache or _given(cache) else None,
        dynamic=DynamicOptions(**_given(dynamic)) if args.dynamic or _given(dynamic) else None,
        tune=TuneOptions(**_given(tune)) if args.tune else None,
        cpu=args.cpu,
    )


def _given(values: Dict[str, Any]) -> Dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def as_text(document: Dict[str, Any]) -> str:
    """The document as plain text: the grids, then a table of the figures and their signatures."""
    lines: List[str] = []
    for search in document["tuning"]:
        lines += [*_grid(search), ""]
    lines.append(f"{'':<28}{'tokens':>12}{'bits':>10}{'perplexity':>14}")
    for one in document["figures"]:
        bits = "-" if one["bits"] is None else f"{one['bits']:.4f}"
        lines.append(
            f"{one['method']:<28}{one['tokens']:>12,}{bits:>10}{_shown(one['perplexity']):>14}"
        )
    lines.append("")
    lines += [f"{one['method']}: {one['signature']}" for one in document["figures"]]
    return "\n".join(lines)


def _grid(search: Dict[str, Any]) -> List[str]:
    """A table of perplexities: the first number searched down, the second across."""
    down, across = [name for name in search["points"][0] if name != "perplexity"]
    table: Dict[float, Dict[float, Any]] = {}
    for point in search["points"]:
        table.setdefault(point[down], {})[point[across]] = point["perplexity"]
    best = search["best"]
    names = {"rate": "eta", "decay": "lambda"}
    down_name, across_name = names.get(down, down), names.get(across, across)
    columns = list(next(iter(table.values())))
    lines = [
        f"{search['method']}: perplexity on {search['subset']}, {search['tokens']:,} tokens",
        f"{down_name} \\ {across_name}".rjust(16) + "".join(f"{one:>12g}" for one in columns),
    ]
    for value, row in table.items():
        cells = []
        for column in columns:
            mark = "*" if (value, column) == (best[down], best[across]) else ""
            cells.append(f"{_shown(row[column]) + mark:>12}")
        lines.append(f"{value:>16g}" + "".join(cells))
    lines.append(
        f"best (*): {down_name} {best[down]:g}, {across_name} {best[across]:g}, "
        f"perplexity {_shown(best['perplexity'])}"
    )
    return lines


def _shown(value: Optional[float]) -> str:
    return "infinite" if value is None else f"{value:.2f}"


class _Bars:
    """One progress bar for each stage, with the time left in it, on stderr."""

    def __init__(self, hidden: bool) -> None:
        self.disable = True if hidden else None  # None: off where stderr is no terminal
        self.bar: Any = None

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *unused: Any) -> None:
        if self.bar is not None:
            self.bar.close()

    def begin(self, stage: str, tokens: int) -> Any:
        """Start the bar of a stage; gives what counts its tokens."""
        self.__exit__()
        self.bar = tqdm(
            total=tokens, disable=self.disable, unit="tok", unit_scale=True, desc=stage,
            file=sys.stderr, leave=False,
        )  # fmt: skip
        return self.bar.update
