"""The state that a language model carries from one segment of a text to the next."""

from __future__ import annotations

from typing import Any

from spectral_fairseq.errors import ConfigurationError


class Carry:
    """The state of one batch of streams, carried from each segment to the next.

    A model starts a segment from :attr:`state` and replaces it by the detached state after the
    segment; the model itself stores nothing. The caller owns one carry for each batch of streams,
    so that training and validation, accumulated micro-batches and workers cannot affect each other.

    Attributes:
        state: ``None`` at the start of a stream, otherwise nested tuples, lists or dictionaries of
            tensors, created by the model and opaque to all other code.
    """

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def reset(self) -> None:
        """Return to the start of a stream."""
        self.state = None


def check_carried(layers: int, streams: int, own_layers: int, own_streams: int) -> None:
    """Refuse a carried state of other numbers of layers or streams than the network has.

    Raises:
        ConfigurationError: it has others.
    """
    if (layers, streams) != (own_layers, own_streams):
        raise ConfigurationError(
            f"a carried state of {own_layers} layers and {own_streams} streams",
            f"one of {layers} layers and {streams} streams",
            "Give each batch of streams a carry of its own, and reset it where their number "
            "changes.",
        )
