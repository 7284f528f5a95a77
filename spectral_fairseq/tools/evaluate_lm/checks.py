"""Refuses impossible or contradictory options before a checkpoint is opened."""

from __future__ import annotations

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.adaptation import DynamicRates
from spectral_fairseq.lm.dynamic_evaluation import check_rates
from spectral_fairseq.lm.evaluation import CacheGrid
from spectral_fairseq.lm.tuning import DYNAMIC_SEGMENT
from spectral_fairseq.options import check_ranges
from spectral_fairseq.tools.evaluate_lm.options import Options
from spectral_fairseq.tools.evaluate_lm.tuning import cache_axes, dynamic_axes
from spectral_fairseq.tools.language_models.overrides import parse_overrides


def check(options: Options) -> None:
    """Refuse options that no model can be evaluated with.

    Args:
        options: of one evaluation.

    Raises:
        ConfigurationError: an option outside its range, or options that contradict each other.
    """
    check_ranges(options)
    parse_overrides(options.overrides)
    cache, dynamic, tune = options.cache, options.dynamic, options.tune
    if cache is not None:
        theta, weight = cache.values
        CacheGrid(cache.window, [theta], [weight]).check()
    if dynamic is not None:
        check_rates(DynamicRates(*dynamic.rates))
    if tune is None:
        return
    if cache is None and dynamic is None:
        raise ConfigurationError(
            "--tune with --cache, --dynamic or both",
            "neither",
            "Add one of them: a plain model has nothing to tune.",
        )
    for method, asked, grids in (
        ("cache", cache, (tune.cache_thetas, tune.cache_weights)),
        ("dynamic", dynamic, (tune.dynamic_rates, tune.dynamic_decays)),
    ):
        if asked is None and grids != (None, None):
            raise ConfigurationError(
                f"--{method} with the options of its grid, --tune-{method}-...",
                "these options alone",
                f"Add --{method}, or leave them out.",
            )
    if cache is not None:
        axes = cache_axes(cache, tune)
        CacheGrid(cache.window, axes["theta"], axes["lambda"]).check()
    if dynamic is not None:
        dynamic_axes(dynamic, tune, DYNAMIC_SEGMENT)
