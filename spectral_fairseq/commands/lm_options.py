"""The options of ``evaluate-lm``, which decide its figures; each is declared here and nowhere else.

This file does not import torch, so that ``--help`` and mistakes on the command line answer at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Dict, Optional, Sequence, Tuple

from spectral_fairseq.options import option

VALIDATION = "valid"

# (eta, lambda, epsilon) of the authors' code for AWD-LSTM: its present version works with mean
# gradients, its first version worked with sums (Krause et al., ICML 2018).
PUBLISHED: Dict[str, Tuple[float, float, float]] = {
    "mean": (5e-5, 0.002, 2e-5),
    "sum": (0.002, 0.02, 0.001),
}
# (theta, lambda) of the cache, published for WikiText-2.
PUBLISHED_CACHE = (0.662, 0.1279)


def _filled(numbers: Sequence[Optional[float]], published: Sequence[float]) -> Tuple[float, ...]:
    """The numbers given, with the published ones in place of None."""
    return tuple(
        default if number is None else number for number, default in zip(numbers, published)
    )


@dataclass
class CacheOptions:
    """Options of the continuous cache; None stands for the value published for WikiText-2."""

    window: int = option(3785, "number of past words that the cache holds", metavar="W", rare=True)
    theta: Optional[float] = option(
        None,
        f"how strongly similar hidden states are preferred (default: {PUBLISHED_CACHE[0]:g})",
        metavar="THETA",
        rare=True,
    )
    weight: Optional[float] = option(
        None,
        f"weight of the cache in the mixture, in [0, 1) (default: {PUBLISHED_CACHE[1]:g})",
        flag_name="lambda",
        metavar="LAMBDA",
        rare=True,
    )

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
    """Options of dynamic evaluation; None stands for the published value in ``units``."""

    rate: Optional[float] = option(
        None,
        f"learning rate eta (default: {PUBLISHED['mean'][0]:g})",
        metavar="ETA",
        rare=True,
    )
    decay: Optional[float] = option(
        None,
        f"mean rate of decay towards the trained weights (default: {PUBLISHED['mean'][1]:g})",
        metavar="LAMBDA",
        rare=True,
    )
    epsilon: Optional[float] = option(
        None,
        f"added to the root mean square of the gradient (default: {PUBLISHED['mean'][2]:g})",
        metavar="EPS",
        rare=True,
    )
    units: str = option(
        "mean",
        "units of eta, lambda and epsilon: the paper's means, or the sums of the method's first "
        "code, whose defaults are 0.002, 0.02 and 0.001. Values for mixtures of softmaxes were "
        "published in sums: lambda 0.075 on PTB, epsilon 0.002 on WikiText-2",
        choices=tuple(PUBLISHED),
        rare=True,
    )
    batches: Optional[int] = option(
        None,
        "gather gradient statistics from the first N batches of the training split (default: all); "
        "with few batches, words that occur in none of them make steps of eta/epsilon",
        metavar="N",
        at_least=1,
        rare=True,
    )
    batch_size: Optional[int] = option(
        None,
        "number of streams in those batches (default: 100)",
        metavar="B",
        at_least=1,
        rare=True,
    )

    @property
    def rates(self) -> Tuple[float, ...]:
        """Eta, lambda and epsilon, in ``units``."""
        return _filled((self.rate, self.decay, self.epsilon), PUBLISHED[self.units])

    def completed(self) -> DynamicOptions:
        """These options with a value for each number of the update."""
        rate, decay, epsilon = self.rates
        return replace(self, rate=rate, decay=decay, epsilon=epsilon)


@dataclass
class TuneOptions:
    """Options of the grid search on the validation split; None stands for the default grid."""

    tokens: Optional[int] = option(
        None, "search on the first N tokens of valid (default: all)", metavar="N", at_least=1
    )
    cache_thetas: Optional[Tuple[float, ...]] = option(
        None,
        "grid of theta (default: --cache-theta where given, otherwise 0.1 to 1.3)",
        flag_name="cache_theta",
        metavar="A,B,...",
        rare=True,
    )
    cache_weights: Optional[Tuple[float, ...]] = option(
        None,
        "grid of lambda (default: --cache-lambda where given, otherwise 0.02 to 0.4)",
        flag_name="cache_lambda",
        metavar="A,B,...",
        rare=True,
    )
    dynamic_rates: Optional[Tuple[float, ...]] = option(
        None,
        "grid of eta (default: --dynamic-rate where given, otherwise the authors' 6 values, "
        "scaled by SEGMENT/5)",
        flag_name="dynamic_rate",
        metavar="A,B,...",
        rare=True,
    )
    dynamic_decays: Optional[Tuple[float, ...]] = option(
        None,
        "grid of lambda (default: --dynamic-decay where given, otherwise the authors' 4 values, "
        "scaled by SEGMENT/5)",
        flag_name="dynamic_decay",
        metavar="A,B,...",
        rare=True,
    )


@dataclass
class EvaluationOptions:
    """What decides the figures; part of every signature."""

    subset: str = option(VALIDATION, "split to evaluate", flag_name="gen_subset", metavar="NAME")
    streams: int = option(
        1, "contiguous parts of the split that are read side by side", metavar="B", at_least=1
    )
    segment: Optional[int] = option(
        None,
        "tokens read at a time (default: as in training; 5 with --dynamic)",
        metavar="T",
        at_least=1,
    )
    overrides: str = option(
        "{}",
        "settings of the checkpoint to replace, such as \"{'mem_len': 640}\"",
        flag_name="model_overrides",
        metavar="DICT",
        rare=True,
    )
    cpu: bool = option(False, "do not use a GPU")
    cache: Optional[CacheOptions] = option(
        None,
        "mix in a cache of the last words (Grave et al. 2017); its options switch it on",
        title="cache (defaults for WikiText-2; for PTB: window 500, theta 1, lambda 0.1)",
    )
    dynamic: Optional[DynamicOptions] = option(
        None,
        "adapt the model to the text that it has been scored on (Krause et al. 2018); its options "
        "switch it on",
        title="dynamic evaluation (defaults for AWD-LSTM, with --segment 5)",
    )
    tune: Optional[TuneOptions] = option(
        None,
        "search theta and lambda of the cache, eta and lambda of dynamic evaluation, unless given",
        title="grid search on the split valid; the evaluated split then uses the best values",
        switches_group_on=False,
    )
