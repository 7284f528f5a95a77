"""The callback through which a long analysis reports its steps, and about how long each takes."""

from __future__ import annotations

from typing import Dict

SHARES: Dict[str, float] = {
    "hash": 1,
    "load": 2,
    "singular values": 6,
    "partition function": 8,
    "cosines": 0.5,
    "decay fits": 0.5,
    "norms and neighbours": 1,
    "drift": 2,
    "predictions": 20,
    "BLEU of the n best": 3,
}
"""Steps of one checkpoint -> their shares of the time, roughly."""


class StepCallback:
    """Called at the start of each step and for each part that is done; this base does nothing."""

    def begin(self, step: str, units: float = 1) -> None:
        """A step starts, which ends the one before.

        Args:
            step: one of :data:`SHARES`.
            units: number of its parts: rows, bytes or sentences.
        """

    def advance(self, units: float) -> None:
        """Further parts of the current step are done."""

    def end(self) -> None:
        """The last step is done."""
