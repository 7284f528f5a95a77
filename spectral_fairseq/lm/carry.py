"""What a stateful language model remembers between two segments of a stream."""

from __future__ import annotations

from typing import Any


class Carry:
    """The state that one batch of streams hands from a segment to the next.

    A model starts a segment from :attr:`state` and leaves the state after it, detached, in its
    place; it keeps nothing itself. Whoever feeds the segments owns one carry for each batch of
    streams: training and validation, the micro-batches of ``--update-freq`` and the workers can
    then not disturb each other.

    Attributes:
        state: ``None`` at the start of a stream, else nested tuples, lists or dictionaries of
            tensors, made by the model and opaque to everybody else.
    """

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def reset(self) -> None:
        """Return to the start of a stream."""
        self.state = None
