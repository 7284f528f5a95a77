"""The state that a stateful language model keeps between two segments of a stream."""

from __future__ import annotations

from typing import Any


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
