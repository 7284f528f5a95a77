"""Grid search over the parameters of the cache and of dynamic evaluation, on a validation corpus.

The cache takes one pass of the model whatever its grid, because theta and lambda only change how
the model's results are mixed. Dynamic evaluation changes the model itself and takes one pass for
each point of its grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence

from spectral_fairseq.errors import ConfigurationError, check_enough, check_range
from spectral_fairseq.functional.progress import ProgressCallback, ignore_progress
from spectral_fairseq.lm.continuous_cache import CacheGrid
from spectral_fairseq.lm.dynamic_evaluation import (
    DynamicEvaluation,
    DynamicRates,
    GradientStatistics,
    check_rates,
    evaluate_adapting,
)
from spectral_fairseq.lm.evaluation import StreamReader, perplexity
from spectral_fairseq.lm.streams import Corpus

CACHE_THETAS = (0.1, 0.2, 0.3, 0.5, 0.662, 0.8, 1.0, 1.3)
CACHE_WEIGHTS = (0.02, 0.05, 0.1, 0.1279, 0.15, 0.2, 0.25, 0.3, 0.4)
"""They surround the values published for AWD-LSTM: (1.0, 0.1) on PTB, (0.662, 0.1279) on WT2."""

DYNAMIC_SEGMENT = 5
DYNAMIC_RATES = (3e-5, 4e-5, 5e-5, 6e-5, 7e-5, 1e-4)
DYNAMIC_DECAYS = (0.001, 0.002, 0.003, 0.005)
"""The grid of the authors' code for segments of 5 tokens; both axes scale with their length."""


@dataclass
class GridSearch:
    """All points of one search.

    Attributes:
        method: ``cache`` or ``dynamic``.
        tokens: number of tokens of the validation corpus on which each point was evaluated.
        points: in the order of the grid, with the first axis outermost: the value of each
            parameter, by its name, and the ``perplexity``, infinite where the model diverged.
    """

    method: str
    tokens: int
    points: List[Dict[str, float]]

    @property
    def best(self) -> Dict[str, float]:
        """The first point with the lowest perplexity.

        Raises:
            ConfigurationError: the model diverged at every point.
        """
        best = min(self.points, key=lambda point: point["perplexity"])
        what = f"the best perplexity in the grid of {self.method} evaluation"
        check_range(what, best["perplexity"], at_least=0, remedy="Search smaller values.")
        return best

    @property
    def ends(self) -> Dict[str, str]:
        """Parameters whose best value lies at an end of their axis -> ``smallest`` or ``largest``.

        Zero is the least value there is, so it is no end; nor is the only value of an axis.
        """
        ends = {}
        for name, best in self.best.items():
            values = {point[name] for point in self.points}
            if name == "perplexity" or len(values) == 1:
                continue
            if best == max(values):
                ends[name] = "largest"
            elif best == min(values) and best > 0:
                ends[name] = "smallest"
        return ends


def check_dynamic_grid(rates: Sequence[float], decays: Sequence[float], epsilon: float) -> None:
    """Refuse a grid with an impossible point.

    Raises:
        ConfigurationError: there is one, or an axis has no value.
    """
    there = min(len(rates), len(decays))
    check_enough(there, 1, "value on each axis of the grid", "Give one.", ConfigurationError)
    for rate in rates:
        for decay in decays:
            check_rates(DynamicRates(rate, decay, epsilon))


def search_cache(
    reader: StreamReader,
    corpus: Corpus,
    grid: CacheGrid,
    dynamic: Optional[DynamicEvaluation] = None,
    progress: ProgressCallback = ignore_progress,
) -> GridSearch:
    """Evaluate every theta with every lambda, in one pass of a model that may adapt meanwhile."""
    evaluated = evaluate_adapting(reader, corpus, dynamic, cache=grid, progress=progress)
    points = [
        {"theta": theta, "lambda": weight, "perplexity": perplexity(nll, evaluated.tokens)}
        for theta, row in zip(grid.thetas, evaluated.cached)
        for weight, nll in zip(grid.weights, row)
    ]
    return GridSearch("cache", evaluated.tokens, points)


def search_dynamic(
    reader: StreamReader,
    corpus: Corpus,
    statistics: GradientStatistics,
    rates: Sequence[DynamicRates],
    labels: Sequence[Dict[str, float]],
    progress: ProgressCallback = ignore_progress,
) -> GridSearch:
    """Evaluate every given point in turn, each starting from the trained weights.

    ``labels`` are the values to report for each point. The trained weights are restored.
    """
    points, tokens = [], 0
    for point, label in zip(rates, labels):
        dynamic = DynamicEvaluation(reader.model, statistics, point)
        evaluated = evaluate_adapting(reader, corpus, dynamic, progress=progress)
        tokens = evaluated.tokens
        points.append({**label, "perplexity": perplexity(evaluated.nll, tokens)})
    return GridSearch("dynamic", tokens, points)
