"""What long work tells of its progress: which step has begun, and how much of it is done."""

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
    "predictions": 20,
    "BLEU of the n best": 3,
}
"""Steps of one checkpoint and about what share of the time each takes."""


class Progress:
    """Is told of the steps of some work and of the parts of each; this one keeps silent."""

    def begin(self, step: str, units: float = 1) -> None:
        """A step begins, and the one before has ended.

        Args:
            step: one of :data:`SHARES`.
            units: parts that it has: rows, bytes, sentences.
        """

    def advance(self, units: float) -> None:
        """So many more parts of the step are done."""
