"""The grids of evaluate-lm, which are searched on the validation split."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence

from spectral_fairseq.commands.lm_options import (
    CacheOptions,
    DynamicOptions,
    TuneOptions,
)
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.lm.grid_search import (
    CACHE_THETAS,
    CACHE_WEIGHTS,
    DYNAMIC_DECAYS,
    DYNAMIC_RATES,
    DYNAMIC_SEGMENT,
    check_dynamic_grid,
)

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
    """The grid of dynamic evaluation: the values given, or the authors' scaled by the segment."""
    scale = segment / DYNAMIC_SEGMENT
    ranges = {
        "rate": (tune.dynamic_rates, dynamic.rate),
        "decay": (tune.dynamic_decays, dynamic.decay),
    }
    if dynamic.units != "mean" and (None, None) in ranges.values():
        raise ConfigurationError(
            "--tune-dynamic-rate and --tune-dynamic-decay beside --dynamic-units sum",
            "one of them missing",
            "Give both: the default grid is in units of means.",
        )
    usual = {"rate": DYNAMIC_RATES, "decay": DYNAMIC_DECAYS}
    axes = {name: _axis(*ranges[name], [scale * value for value in usual[name]]) for name in ranges}
    check_dynamic_grid(axes["rate"], axes["decay"], dynamic.rates[2])
    return axes
