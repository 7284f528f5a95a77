"""Mean and spread of every measure over the seeds of a method."""

from __future__ import annotations

import statistics
from typing import Any, Dict, List, Mapping, Sequence

from spectral_fairseq.errors import ConfigurationError


def check_methods(methods: Sequence[str], count: int) -> None:
    """Refuse another number of names than there are checkpoints.

    Args:
        methods: the names.
        count: number of checkpoints.

    Raises:
        ConfigurationError: not one name for each checkpoint.
    """
    if len(methods) != count:
        raise ConfigurationError(
            f"{count} names in --methods, one for each checkpoint",
            f"{len(methods)}: {', '.join(methods)}",
            "Separate them by commas, and repeat the name of a method for each of its seeds.",
        )


def by_method(
    checkpoints: Sequence[Mapping[str, Any]], methods: Sequence[str]
) -> List[Dict[str, Any]]:
    """Return the entries ``methods`` of the document, in the order in which methods first appear.

    Args:
        checkpoints: entries of the document.
        methods: of each checkpoint; those of equal names are seeds of one method.

    Returns:
        For each method its name, the labels of its checkpoints, and for each measure that all of
        them have the mean and the sample standard deviation (divided by n - 1), which is None for
        a single checkpoint.

    Raises:
        ConfigurationError: not one name for each checkpoint.
    """
    check_methods(methods, len(checkpoints))
    found = []
    for name in dict.fromkeys(methods):
        seeds = [one for one, method in zip(checkpoints, methods) if method == name]
        known = {
            key: [one["measures"][key] for one in seeds]
            for key in seeds[0]["measures"]
            if all(one["measures"].get(key) is not None for one in seeds)
        }
        found.append(
            {
                "name": name,
                "labels": [one["label"] for one in seeds],
                "measures": {key: _summary(values) for key, values in known.items()},
            }
        )
    return found


def _summary(values: List[float]) -> Dict[str, Any]:
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": spread}
