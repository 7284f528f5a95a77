"""The options that decide the figures of a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Tuple

from spectral_fairseq.errors import check_choice, check_range

PROJECTIONS = ("svd", "pca")


@dataclass
class Options:
    """What is sampled, and how; ``analyze --help-all`` explains each."""

    seed: int = 1
    isotropy_words: int = 0
    isotropy_runs: int = 10
    cosine_words: int = 4000
    projection_words: int = 4000
    projection: str = PROJECTIONS[0]
    neighbours: int = 10
    words: Tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse impossible values; ``words`` may be one word, or any sequence of them."""
        self.words = (self.words,) if isinstance(self.words, str) else tuple(self.words)
        check_range("`seed`", self.seed, at_least=0, below=2**63, whole=True)
        check_range("`isotropy_words`", self.isotropy_words, at_least=0, whole=True)
        check_range("`isotropy_runs`", self.isotropy_runs, at_least=1, whole=True)
        check_range("`cosine_words`", self.cosine_words, at_least=2, whole=True)
        check_range("`projection_words`", self.projection_words, at_least=2, whole=True)
        check_range("`neighbours`", self.neighbours, at_least=1, whole=True)
        check_choice("`projection`", self.projection, PROJECTIONS)


SHARES: Dict[str, float] = {
    "hash": 1,
    "load": 2,
    "singular values": 6,
    "partition function": 8,
    "cosines": 0.5,
    "norms and neighbours": 1,
    "predictions": 20,
    "BLEU of the n best": 3,
}
"""Steps of one checkpoint -> their shares of the time, roughly."""


class StepCallback:
    """Called at the start of each step and for each part that is done; this base does nothing."""

    def begin(self, step: str, units: float = 1) -> None:
        """A step starts, which ends the one before."""

    def advance(self, units: float) -> None:
        """Further parts of the current step are done."""

    def end(self) -> None:
        """The last step is done."""
