"""The options that decide the figures of a report; each is declared here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Tuple

from spectral_fairseq.options import check_ranges, option


@dataclass
class Options:
    """What is sampled, and how; part of every signature."""

    seed: int = option(1, "seed of all random samples", at_least=0, below=2**63, rare=True)
    isotropy_words: int = option(
        0,
        "measure I1 and I2 on random samples of N words, as the papers do for language models "
        "(N = 40000 there); 0 takes all words at once",
        metavar="N",
        at_least=0,
        rare=True,
    )
    isotropy_runs: int = option(
        10,
        "number of samples whose I1 and I2 are averaged",
        metavar="N",
        at_least=1,
        rare=True,
    )
    cosine_words: int = option(
        4000,
        "compute the distribution of cosines from the pairs of N random words",
        metavar="N",
        at_least=2,
        rare=True,
    )
    projection_words: int = option(
        4000,
        "draw N random words in the projection",
        metavar="N",
        at_least=2,
        rare=True,
    )
    projection: str = option(
        "svd",
        "project the words on the first two singular vectors (svd), or on the first two principal "
        "components, which subtracts the mean first (pca)",
        choices=("svd", "pca"),
        rare=True,
    )
    neighbours: int = option(
        10,
        "list N nearest neighbours of each word of --words",
        metavar="N",
        at_least=1,
        rare=True,
    )
    words: Tuple[str, ...] = option(
        (), "list the nearest neighbours of these words", metavar="WORD"
    )

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        check_ranges(self)


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
