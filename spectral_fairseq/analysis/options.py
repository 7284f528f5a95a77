"""The options that decide the figures of a report; each is declared here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Tuple

from spectral_fairseq.options import check_ranges, option


@dataclass
class Options:
    """What is sampled, and how; part of every signature."""

    seed: int = option(1, "seed of all random samples", at_least=0, below=2**63)
    isotropy_words: int = option(
        0,
        "measure I1 and I2 on random samples of N words, as the papers do for language models "
        "(N = 40000 there); 0 takes all words at once",
        metavar="N",
        at_least=0,
    )
    isotropy_runs: int = option(
        10, "number of samples whose I1 and I2 are averaged", metavar="N", at_least=1
    )
    cosine_words: int = option(
        4000,
        "compute the distribution of cosines from the pairs of N random words",
        metavar="N",
        at_least=2,
    )
    projection_words: int = option(
        4000, "draw N random words in the projection", metavar="N", at_least=2
    )
    projection: str = option(
        "svd",
        "project the words on the first two singular vectors (svd), or on the first two principal "
        "components, which subtracts the mean first (pca)",
        choices=("svd", "pca"),
    )
    neighbours: int = option(
        10, "list N nearest neighbours of each word of --words", metavar="N", at_least=1
    )
    words: Tuple[str, ...] = option(
        (), "list the nearest neighbours of these words", metavar="WORD"
    )

    def check(self) -> None:
        """Refuse impossible values.

        Raises:
            ConfigurationError: an option outside its range.
        """
        check_ranges(self)
