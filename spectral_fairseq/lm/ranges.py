"""Checks of the sizes and probabilities that a network is built with."""

from __future__ import annotations

from spectral_fairseq.errors import ConfigurationError


def check_sizes(**sizes: int) -> None:
    """Refuse sizes below 1.

    Args:
        sizes: by argument name.

    Raises:
        ConfigurationError: it names the argument.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ConfigurationError(f"`{name}` to be 1 or more", repr(size), f"Raise `{name}`.")


def check_probabilities(**probabilities: float) -> None:
    """Refuse probabilities outside [0, 1).

    Args:
        probabilities: by argument name.

    Raises:
        ConfigurationError: it names the argument.
    """
    for name, p in probabilities.items():
        if not 0.0 <= p < 1.0:
            raise ConfigurationError(
                f"`{name}` in [0, 1)", repr(p), "Choose a probability in that range."
            )
