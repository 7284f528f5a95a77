"""Checks of the arguments that the networks have in common."""

from __future__ import annotations

from spectral_fairseq.errors import check_range


def check_layer_sizes(**sizes: int) -> None:
    """Refuse sizes below 1.

    Raises:
        ConfigurationError: one of them is.
    """
    for name, size in sizes.items():
        check_range(f"`{name}`", size, at_least=1, whole=True)


def check_probabilities(**probabilities: float) -> None:
    """Refuse probabilities outside [0, 1).

    Raises:
        ConfigurationError: one of them is.
    """
    for name, p in probabilities.items():
        check_range(f"`{name}`", p, at_least=0, below=1)
