"""The options of ``evaluate-lm``, which decide its figures, and their flags.

This file does not import torch, so that ``--help`` and mistakes on the command line answer at once.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any, Dict, Optional, Sequence, Tuple

from spectral_fairseq.commands.arguments import Rare, numbers
from spectral_fairseq.errors import check_range, idle_flag
from spectral_fairseq.options import flag_of

VALIDATION = "valid"

# (eta, lambda, epsilon) of the authors' code for AWD-LSTM: its present version works with mean
# gradients, its first version worked with sums (Krause et al., ICML 2018).
PUBLISHED: Dict[str, Tuple[float, float, float]] = {
    "mean": (5e-5, 0.002, 2e-5),
    "sum": (0.002, 0.02, 0.001),
}
# A batch of the published gradient statistics is 100 streams x 5 tokens.
STATISTICS_STREAMS = 100
# (theta, lambda) of the cache, published for WikiText-2.
PUBLISHED_CACHE = (0.662, 0.1279)


def _filled(numbers: Sequence[Optional[float]], published: Sequence[float]) -> Tuple[float, ...]:
    """The numbers given, with the published ones in place of None."""
    return tuple(
        default if number is None else number for number, default in zip(numbers, published)
    )


@dataclass
class CacheOptions:
    """Options of the continuous cache; None stands for the value published for WikiText-2.

    Attributes:
        window: number of past words that the cache holds.
        theta: how strongly similar hidden states are preferred.
        weight: lambda, the share of the cache in the mixture.
    """

    window: int = 3785
    theta: Optional[float] = None
    weight: Optional[float] = None

    @property
    def values(self) -> Tuple[float, ...]:
        """Theta and lambda."""
        return _filled((self.theta, self.weight), PUBLISHED_CACHE)

    def completed(self) -> CacheOptions:
        """These options with a value for each."""
        theta, weight = self.values
        return replace(self, theta=theta, weight=weight)


@dataclass
class DynamicOptions:
    """Options of dynamic evaluation; None stands for the published value in ``units``.

    Attributes:
        rate: eta.
        decay: lambda, the mean rate of decay towards the trained weights.
        epsilon: added to the root mean square of the gradient.
        units: of these three: ``mean`` or ``sum``, as in :data:`PUBLISHED`.
        batches: of the training split, whose gradients are gathered; all if None.
        batch_size: number of streams in them; None is :data:`STATISTICS_STREAMS`.
    """

    rate: Optional[float] = None
    decay: Optional[float] = None
    epsilon: Optional[float] = None
    units: str = "mean"
    batches: Optional[int] = None
    batch_size: Optional[int] = None

    @property
    def rates(self) -> Tuple[float, ...]:
        """Eta, lambda and epsilon, in ``units``."""
        return _filled((self.rate, self.decay, self.epsilon), PUBLISHED[self.units])

    @property
    def statistics_streams(self) -> int:
        """The number of streams in a batch of the training split."""
        return self.batch_size or STATISTICS_STREAMS

    def completed(self) -> DynamicOptions:
        """These options with a value for each number of the update."""
        rate, decay, epsilon = self.rates
        return replace(self, rate=rate, decay=decay, epsilon=epsilon)


@dataclass
class TuneOptions:
    """Options of the grid search on the validation split; None stands for the default grid.

    Attributes:
        tokens: first ones of the split to search on; all if None.
        cache_thetas: grid of theta.
        cache_weights: grid of the cache's lambda.
        dynamic_rates: grid of eta.
        dynamic_decays: grid of dynamic evaluation's lambda.
    """

    tokens: Optional[int] = None
    cache_thetas: Optional[Tuple[float, ...]] = None
    cache_weights: Optional[Tuple[float, ...]] = None
    dynamic_rates: Optional[Tuple[float, ...]] = None
    dynamic_decays: Optional[Tuple[float, ...]] = None


@dataclass
class EvaluationOptions:
    """What decides the figures; part of every signature.

    Attributes:
        subset: split to evaluate.
        streams: contiguous parts of the split that are read side by side.
        segment: tokens read at a time; as in training if None, 5 with ``dynamic``.
        overrides: settings of the checkpoint to replace, as a dictionary that Python can read.
        cpu: whether no GPU is used.
        cache: mixed in, if given.
        dynamic: evaluation, if given.
        tune: the search of what the cache and dynamic evaluation leave open, if given.
    """

    subset: str = VALIDATION
    streams: int = 1
    segment: Optional[int] = None
    overrides: str = "{}"
    cpu: bool = False
    cache: Optional[CacheOptions] = None
    dynamic: Optional[DynamicOptions] = None
    tune: Optional[TuneOptions] = None

    def check(self) -> None:
        """Refuse numbers out of range, and a search for what is not evaluated, by their flags.

        Raises:
            ConfigurationError: the first of them.
        """
        given = {"--streams": self.streams, "--segment": self.segment}
        if self.dynamic is not None:
            given["--dynamic-batches"] = self.dynamic.batches
            given["--dynamic-batch-size"] = self.dynamic.batch_size
        if self.tune is not None:
            given["--tune-tokens"] = self.tune.tokens
        for flag, number in given.items():
            check_range(flag, number, at_least=1, whole=True, optional=True)
        if self.tune is not None:
            self._check_search(self.tune)

    def _check_search(self, tune: TuneOptions) -> None:
        if self.cache is None and self.dynamic is None:
            raise idle_flag("--tune", "--cache, --dynamic or both")
        for method, asked, grids in (
            ("cache", self.cache, (tune.cache_thetas, tune.cache_weights)),
            ("dynamic", self.dynamic, (tune.dynamic_rates, tune.dynamic_decays)),
        ):
            if asked is None and grids != (None, None):
                raise idle_flag(f"--tune-{method}-...", f"--{method}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of these classes."""
    add = parser.add_argument
    add("--gen-subset", default=VALIDATION, metavar="NAME", help="split to evaluate")
    add(
        "--streams",
        type=int,
        default=EvaluationOptions.streams,
        metavar="B",
        help="contiguous parts of the split that are read side by side",
    )
    add(
        "--segment",
        type=int,
        metavar="T",
        help="tokens read at a time (default: as in training; 5 with --dynamic)",
    )
    add(
        "--model-overrides",
        default=EvaluationOptions.overrides,
        metavar="DICT",
        help=Rare("settings of the checkpoint to replace, such as \"{'mem_len': 640}\""),
    )
    add("--cpu", action="store_true", help="do not use a GPU")
    _add_cache(
        parser.add_argument_group(
            "cache (defaults for WikiText-2; for PTB: window 500, theta 1, lambda 0.1)"
        )
    )
    _add_dynamic(
        parser.add_argument_group("dynamic evaluation (defaults for AWD-LSTM, with --segment 5)")
    )
    _add_tune(
        parser.add_argument_group(
            "grid search on the split valid; the evaluated split then uses the best values"
        )
    )


def _add_cache(group: Any) -> None:
    add = group.add_argument
    add(
        "--cache",
        action="store_true",
        help="mix in a cache of the last words (Grave et al. 2017); its options switch it on",
    )
    add(
        "--cache-window",
        type=int,
        metavar="W",
        help=Rare(f"number of past words that the cache holds (default: {CacheOptions.window})"),
    )
    add(
        "--cache-theta",
        type=float,
        metavar="THETA",
        help=Rare(
            f"how strongly similar hidden states are preferred (default: {PUBLISHED_CACHE[0]:g})"
        ),
    )
    add(
        "--cache-lambda",
        type=float,
        metavar="LAMBDA",
        help=Rare(
            f"weight of the cache in the mixture, in [0, 1) (default: {PUBLISHED_CACHE[1]:g})"
        ),
    )


def _add_dynamic(group: Any) -> None:
    add = group.add_argument
    rate, decay, epsilon = PUBLISHED["mean"]
    add(
        "--dynamic",
        action="store_true",
        help="adapt the model to the text that it has been scored on (Krause et al. 2018); its "
        "options switch it on",
    )
    for flag, metavar, text, default in (
        ("--dynamic-rate", "ETA", "learning rate eta", rate),
        ("--dynamic-decay", "LAMBDA", "mean rate of decay towards the trained weights", decay),
        ("--dynamic-epsilon", "EPS", "added to the root mean square of the gradient", epsilon),
    ):
        add(flag, type=float, metavar=metavar, help=Rare(f"{text} (default: {default:g})"))
    add(
        "--dynamic-units",
        choices=tuple(PUBLISHED),
        help=Rare(
            "units of eta, lambda and epsilon: the paper's means, or the sums of the method's "
            "first code, whose defaults are 0.002, 0.02 and 0.001. Values for mixtures of "
            "softmaxes were published in sums: lambda 0.075 on PTB, epsilon 0.002 on WikiText-2 "
            f"(default: {DynamicOptions.units})"
        ),
    )
    add(
        "--dynamic-batches",
        type=int,
        metavar="N",
        help=Rare(
            "gather gradient statistics from the first N batches of the training split (default: "
            "all); with few batches, words that occur in none of them make steps of eta/epsilon"
        ),
    )
    add(
        "--dynamic-batch-size",
        type=int,
        metavar="B",
        help=Rare(f"number of streams in those batches (default: {STATISTICS_STREAMS})"),
    )


def _add_tune(group: Any) -> None:
    add = group.add_argument
    add(
        "--tune",
        action="store_true",
        help="search theta and lambda of the cache, eta and lambda of dynamic evaluation, unless "
        "given",
    )
    add(
        "--tune-tokens",
        type=int,
        metavar="N",
        help="search on the first N tokens of valid (default: all)",
    )
    for flag, text in (
        (
            "--tune-cache-theta",
            "grid of theta (default: --cache-theta where given, otherwise 0.1 to 1.3)",
        ),
        (
            "--tune-cache-lambda",
            "grid of lambda (default: --cache-lambda where given, otherwise 0.02 to 0.4)",
        ),
        (
            "--tune-dynamic-rate",
            "grid of eta (default: --dynamic-rate where given, otherwise the authors' 6 values, "
            "scaled by SEGMENT/5)",
        ),
        (
            "--tune-dynamic-decay",
            "grid of lambda (default: --dynamic-decay where given, otherwise the authors' 4 "
            "values, scaled by SEGMENT/5)",
        ),
    ):
        add(flag, type=numbers, metavar="A,B,...", help=Rare(text))


def options_of(args: argparse.Namespace) -> EvaluationOptions:
    """The options that a command line gives.

    Raises:
        ConfigurationError: an option of the search without the search.
    """
    cache = _given(args, window="cache_window", theta="cache_theta", weight="cache_lambda")
    names = ("rate", "decay", "epsilon", "units", "batches", "batch_size")
    dynamic = _given(args, **{name: f"dynamic_{name}" for name in names})
    tune = _given(
        args,
        tokens="tune_tokens",
        cache_thetas="tune_cache_theta",
        cache_weights="tune_cache_lambda",
        dynamic_rates="tune_dynamic_rate",
        dynamic_decays="tune_dynamic_decay",
    )
    if tune and not args.tune:
        of_search = (name for name in vars(args) if name.startswith("tune_"))
        given = [flag_of(name) for name in of_search if getattr(args, name) is not None]
        raise idle_flag(" and ".join(given), "--tune")
    return EvaluationOptions(
        subset=args.gen_subset,
        streams=args.streams,
        segment=args.segment,
        overrides=args.model_overrides,
        cpu=args.cpu,
        cache=CacheOptions(**cache) if args.cache or cache else None,
        dynamic=DynamicOptions(**dynamic) if args.dynamic or dynamic else None,
        tune=TuneOptions(**tune) if args.tune else None,
    )


def _given(args: argparse.Namespace, **arguments: str) -> Dict[str, Any]:
    """Field -> value, of the fields whose arguments the command line gives.

    Args:
        args: the command line.
        **arguments: the argument of each field.
    """
    values = {field: getattr(args, name) for field, name in arguments.items()}
    return {field: value for field, value in values.items() if value is not None}
