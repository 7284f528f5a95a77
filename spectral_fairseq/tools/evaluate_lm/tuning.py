"""The grids searched on the validation split, and whether the best value lies at an end."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.lm.tuning import (
    CACHE_THETAS,
    CACHE_WEIGHTS,
    DYNAMIC_DECAYS,
    DYNAMIC_RATES,
    DYNAMIC_SEGMENT,
    GridSearch,
    check_dynamic_grid,
)
from spectral_fairseq.tools.evaluate_lm.options import CacheOptions, DynamicOptions, TuneOptions

Axes = Dict[str, List[float]]
"""Name of a number that is searched -> the values tried, ascending."""


def cache_axes(cache: CacheOptions, tune: TuneOptions) -> Axes:
    """The grid of the cache: the values given, or those around the published ones."""
    return {
        "theta": _axis(tune.cache_thetas, cache.theta, CACHE_THETAS),
        "lambda": _axis(tune.cache_weights, cache.weight, CACHE_WEIGHTS),
    }


def _axis(
    grid: Optional[Sequence[float]], value: Optional[float], usual: Sequence[float]
) -> List[float]:
    """The grid that the user gave, the one value that the user gave, or the usual grid."""
    if grid is None:
        grid = usual if value is None else [value]
    return sorted(grid)


def dynamic_axes(dynamic: DynamicOptions, tune: TuneOptions, segment: int) -> Axes:
    """The grid of dynamic evaluation: the values given, or the authors' scaled by the segment.

    Raises:
        ConfigurationError: an impossible value, or no values beside ``--dynamic-units sum``.
    """
    scale = segment / DYNAMIC_SEGMENT
    given = {
        "rate": (tune.dynamic_rates, dynamic.rate),
        "decay": (tune.dynamic_decays, dynamic.decay),
    }
    if dynamic.units != "mean" and (None, None) in given.values():
        raise ConfigurationError(
            "--tune-dynamic-rate and --tune-dynamic-decay beside --dynamic-units sum",
            "one of them missing",
            "Give both: the default grid is in units of means.",
        )
    usual = {"rate": DYNAMIC_RATES, "decay": DYNAMIC_DECAYS}
    axes = {name: _axis(*given[name], [scale * value for value in usual[name]]) for name in given}
    check_dynamic_grid(axes["rate"], axes["decay"], dynamic.rates[2])
    return axes


def axes_of(search: GridSearch) -> Axes:
    """The values that a search has tried."""
    names = search.points[0].values
    return {name: sorted({point.values[name] for point in search.points}) for name in names}


def ends_reached(search: GridSearch) -> Dict[str, str]:
    """Numbers whose best value lies at an end of their axis -> ``smallest`` or ``largest``.

    Zero is the least value there is, so it is no end; nor is the only value of an axis.
    """
    found = {}
    for name, values in axes_of(search).items():
        best = search.best.values[name]
        if len(values) > 1 and best == values[-1]:
            found[name] = "largest"
        elif len(values) > 1 and best == values[0] and best > 0:
            found[name] = "smallest"
    return found
