"""What several measures of one table have in common, each computed when it is first needed."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.analysis.options import Options, StepCallback
from spectral_fairseq.checkpoints.dictionary import WordList
from spectral_fairseq.errors import DIVERGED, DataError
from spectral_fairseq.formats.table import StoredTable
from spectral_fairseq.functional.cosines import (
    cosine_histogram,
    mean_cosine,
    mean_cosines,
    positive_share,
)
from spectral_fairseq.functional.gram import table_gram
from spectral_fairseq.functional.isoscore import covariance_from_gram
from spectral_fairseq.functional.isotropy import (
    NARROW_ROW_NORM,
    centred_log_partition,
    isotropy_i1,
    isotropy_i2,
    log_partition,
)
from spectral_fairseq.functional.random_spectrum import random_spectrum, upper_edge
from spectral_fairseq.functional.row_blocks import cached_rows, row_blocks, sample_rows
from spectral_fairseq.functional.row_norms import row_lengths, rows_from
from spectral_fairseq.functional.spectra import right_singular_system_of_gram, roundoff
from spectral_fairseq.functional.spectrum_penalty import Prior
from spectral_fairseq.functional.untrained_rows import untrained_rows
from spectral_fairseq.functional.word_counts import smoothed_log_counts

COSINE_BINS = 100
# The squares of squared lengths are numbers in float64 down to here. No table of float32 has
# shorter vectors.
SHORTEST = 1e-70
_FINE_BINS = 20_000
# Of a table with more products of a row and a direction than that, I1 and I2 are sampled: one core
# does so many in some ten seconds in float32.
MOST_PRODUCTS = 1 << 39
SAMPLED_WORDS = 40_000
GROUPS = ("frequent", "medium", "rare")
"""Thirds of the words in the order of their counts."""


class Isotropy(NamedTuple):
    """I1 and I2, as they are and centred at unit scale.

    Attributes:
        means: such as ``i1_centred`` -> its value, or its mean over the samples.
        words: in a sample; None where all words were taken at once.
        samples: such as ``i1_centred`` -> one value for each sample.
    """

    means: Dict[str, float]
    words: Optional[int]
    samples: Dict[str, List[float]]


class Histogram(NamedTuple):
    """The distribution of cosines, in bins that are narrow even for a narrow cone.

    Attributes:
        edges: of the bins.
        counts: pairs in each bin.
    """

    edges: List[float]
    counts: List[int]

    def coarse(self) -> Dict[str, Any]:
        """Edges and counts of :data:`COSINE_BINS` bins, for pictures."""
        width = len(self.counts) // COSINE_BINS
        starts = range(0, len(self.counts), width)
        return {
            "edges": self.edges[::width],
            "counts": [sum(self.counts[start : start + width]) for start in starts],
        }

    @property
    def positive(self) -> float:
        """Share of the pairs whose cosine is not negative."""
        return positive_share(self.edges, self.counts)


class TableFacts:
    """Shared intermediate results for the measures of one table.

    Args:
        table: the table, without rows that stand for no word.
        options: what is sampled, and how.
        words: the dictionary of the table's rows.
        prior: that the table was trained with.
        progress: called at each step.

    Raises:
        DataError: by any attribute, if the table cannot be measured.
    """

    def __init__(
        self,
        table: StoredTable,
        options: Options,
        words: Optional[WordList] = None,
        prior: Optional[Prior] = None,
        progress: Optional[StepCallback] = None,
    ) -> None:
        self.table = table
        self.options = options
        self.words = words
        self.weight = table.weight  # [N, d]
        self.count, self.dim = table.weight.shape
        self._prior = prior
        self.progress = progress or StepCallback()

    @cached_property
    def norms(self) -> Tensor:
        """Euclidean norm of each row, shape (N,), float64."""
        # In the precision of the table, or float32 for narrower ones, without a copy of it.
        narrowest = self.weight.dtype if self.weight.dtype == torch.float64 else torch.float32
        blocks = row_blocks(self.weight, cached_rows(self.dim), narrowest)
        norms = torch.cat([row_lengths(block) for block in blocks])
        if not torch.isfinite(norms).all():  # though every entry is finite: their squares are not
            raise DataError(
                f"vectors in {self.table.name} whose lengths are numbers in {self.table.dtype}",
                f"{int((~torch.isfinite(norms)).sum())} of {self.count} that are too long, with "
                f"entries up to {max(abs(float(end)) for end in self.weight.aminmax()):.3g}",
                DIVERGED,
            )
        if 0 < float(norms.max()) < SHORTEST:
            raise DataError(
                f"vectors in {self.table.name} of a length of at least {SHORTEST:g}",
                f"{float(norms.max()):.3g} for the longest, whose squares are not numbers",
                "Multiply the table by a larger number: most measures do not depend on its scale.",
            )
        return norms

    @cached_property
    def _gram(self) -> Tensor:
        self.progress.begin("singular values", self.count)
        return table_gram(self.weight, progress=self.progress.advance)

    @cached_property
    def _singular_system(self) -> Tuple[Tensor, Tensor]:
        sigma, directions = right_singular_system_of_gram(self._gram, self.count)
        if float(sigma[0]) == 0:
            raise DataError(
                f"word vectors in {self.table.name}",
                "zeros only",
                "Choose a trained checkpoint or table.",
            )
        return sigma, directions

    @property
    def sigma(self) -> Tensor:
        """Singular values of W, largest first, shape (d,), float64."""
        return self._singular_system[0]

    @property
    def directions(self) -> Tensor:
        """Right singular vectors of W as columns, shape (d, d), float64."""
        return self._singular_system[1]

    @property
    def rms_norm(self) -> float:
        """Root mean square of the row norms."""
        return float(self.sigma.norm()) / math.sqrt(self.count)

    @cached_property
    def mean(self) -> Tensor:
        """Mean of the rows, shape (d,), float64."""
        return _mean(self.weight)

    @cached_property
    def _centred_system(self) -> Tuple[Tensor, Tensor]:
        return _centred(self._gram, self.sigma, self.mean, self.count)

    @property
    def centred_sigma(self) -> Tensor:
        """Singular values of W minus its mean row, largest first, shape (d,), float64."""
        return self._centred_system[0]

    @property
    def principal_axes(self) -> Tensor:
        """Right singular vectors of W minus its mean row as columns, shape (d, d), float64."""
        return self._centred_system[1]

    @cached_property
    def centred_norms(self) -> Tensor:
        """Euclidean norm of each row minus the mean row, shape (N,), float64."""
        blocks = row_blocks(self.weight, cached_rows(self.dim))
        return torch.cat([row_lengths(block - self.mean) for block in blocks])

    @property
    def centred_rms_norm(self) -> float:
        """Root mean square of the norms of the rows minus their mean."""
        return float(self.centred_sigma.norm()) / math.sqrt(self.count)

    @cached_property
    def random_sigma(self) -> Tensor:
        """Singular values to be expected of a random table like this one, shape (d,), float64."""
        return random_spectrum(self.count, self.dim, self.rms_norm)

    @property
    def edge(self) -> float:
        """Largest singular value to be expected of a random table like this one."""
        return upper_edge(self.count, self.dim, self.rms_norm)

    @property
    def centred_edge(self) -> float:
        """The same for the rows minus their mean."""
        return upper_edge(self.count, self.dim, self.centred_rms_norm)

    @cached_property
    def isotropy(self) -> Isotropy:
        """I1 and I2 of all words, or of random samples.

        What would take more than :data:`MOST_PRODUCTS` is measured on :data:`SAMPLED_WORDS` words,
        as many as the papers sample, along the directions of the whole table.
        """
        count, wanted, progress = self.count, self.options.isotropy_words, self.progress
        # See functional/isotropy.py, Note [Z in float32]. All words of a float32
        # table are worth float64; numbers of 16 bits have fewer digits than float32 keeps.
        short = float(self.norms.max()) <= NARROW_ROW_NORM
        narrowest = torch.float32 if short and self.weight.element_size() <= 4 else torch.float64
        if not wanted or wanted >= count:
            directions, centred = self.directions, self._centred_system
            costly = count > SAMPLED_WORDS and count * self.dim**2 > MOST_PRODUCTS
            weight, mean = self.weight, self.mean
            if costly:
                weight = weight[sample_rows(count, SAMPLED_WORDS, self.options.seed)]
                mean = _mean(weight)
            progress.begin("partition function", 2 * len(weight))
            whole = narrowest if costly or weight.element_size() <= 2 else torch.float64
            runs = [
                _isotropy(weight, mean, directions, centred, count, (whole, narrowest), progress)
            ]
            words = len(weight) if costly else None
        else:
            progress.begin("partition function", 3 * wanted * self.options.isotropy_runs)
            words, runs = wanted, []
            for run in range(self.options.isotropy_runs):
                sample = self.weight[sample_rows(count, wanted, self.options.seed + run)]
                gram = table_gram(sample, progress=progress.advance)
                sigma, directions = right_singular_system_of_gram(gram, len(sample))
                mean = _mean(sample)
                centred = _centred(gram, sigma, mean, len(sample))
                dtypes = (narrowest, narrowest)
                runs.append(_isotropy(sample, mean, directions, centred, wanted, dtypes, progress))
        samples = {key: [run[key] for run in runs] for key in runs[0]}
        means = {key: sum(values) / len(values) for key, values in samples.items()}
        return Isotropy(means, words, samples)

    @cached_property
    def mean_cosine(self) -> float:
        """Mean cosine over all pairs of different rows."""
        self.progress.begin("cosines")
        return mean_cosine(self.weight)

    @cached_property
    def centred_mean_cosine(self) -> float:
        """Mean cosine over all pairs of different rows minus the mean row."""
        return mean_cosine(self.weight, centre=self.mean)

    @cached_property
    def cosine_sample(self) -> Tensor:
        """The rows whose cosines are all computed, shape (n, d)."""
        rows = sample_rows(self.count, self.options.cosine_words, self.options.seed)
        return self.weight[rows]

    @cached_property
    def cosines(self) -> Histogram:
        """Cosines between the sampled words."""
        return Histogram(*cosine_histogram(self.cosine_sample, _FINE_BINS))

    @cached_property
    def centred_cosines(self) -> Histogram:
        """Cosines between the sampled words after the mean of all rows is subtracted."""
        sample = self.cosine_sample
        wide = sample if sample.dtype == torch.float64 else sample.float()
        return Histogram(*cosine_histogram(rows_from(wide, self.mean), _FINE_BINS))

    @cached_property
    def untrained(self) -> Tensor:
        """Rows of ``weight`` that look never trained, ascending; ``untrained_rows.py`` says how."""
        return untrained_rows(self.weight, self.norms)

    @cached_property
    def log_counts(self) -> Optional[Tensor]:
        """Smoothed log count of each word, shape (N,); None without counts."""
        if self.words is None or not self.words.has_counts:
            return None
        return smoothed_log_counts(self.words.counts)[self.table.rows].double()

    @cached_property
    def frequency_order(self) -> Tensor:
        """Rows of ``weight``, the most frequent word first, shape (N,).

        Without counts it is the order of the rows.
        """
        if self.words is None or not self.words.has_counts:
            return torch.arange(self.count)
        counts = torch.tensor(self.words.counts)[self.table.rows]
        return torch.sort(counts, descending=True, stable=True).indices

    @cached_property
    def group_cosines(self) -> Dict[str, float]:
        """Mean cosine within each group of :data:`GROUPS`; empty without counts."""
        if self.log_counts is None:
            return {}
        place = torch.empty(self.count, dtype=torch.long)
        place[self.frequency_order] = torch.arange(self.count) * len(GROUPS) // self.count
        return dict(zip(GROUPS, mean_cosines(self.weight, place, len(GROUPS))))

    @cached_property
    def prior_sigma(self) -> Optional[Tensor]:
        """Singular values of the prior that the table was trained with, shape (d,)."""
        norm = self.table.initial_norm
        if self._prior is None or (self._prior.c1 is None and norm is None):
            return None
        return self._prior.spectrum(self.dim, norm)


def _mean(weight: Tensor) -> Tensor:
    """Mean row, shape (d,), float64."""
    total = weight.new_zeros(weight.size(1), dtype=torch.float64)
    for block in row_blocks(weight, cached_rows(weight.size(1))):
        total += block.sum(0)
    return total / weight.size(0)


def _centred(gram: Tensor, sigma: Tensor, mean: Tensor, count: int) -> Tuple[Tensor, Tensor]:
    """The singular system of the rows minus their mean, from the Gram matrix of the rows.

    What cannot be told from zero is decided by the longer rows that were subtracted:
    functional/spectra.py, Note [Roundoff of a Gram matrix].
    """
    centred = covariance_from_gram(gram, mean * count, count) * (count - 1)
    values, axes = right_singular_system_of_gram(centred, count)
    noise = roundoff(count, len(sigma), sigma.dtype) * sigma[0].square()
    return torch.where(values.square() > noise, values, torch.zeros_like(values)), axes


def _isotropy(
    weight: Tensor,
    mean: Tensor,
    directions: Tensor,
    centred: Tuple[Tensor, Tensor],
    count: int,
    dtypes: Tuple[torch.dtype, torch.dtype],
    progress: StepCallback,
) -> Dict[str, float]:
    """I1 and I2 as they are, and of the rows minus ``mean`` at unit scale.

    ``count`` is the number of rows that ``centred``, their singular system, belongs to. The first
    dtype is for the rows as they are, the second for the centred ones.
    """
    step = progress.advance
    partitions = {"": log_partition(weight, directions, dtype=dtypes[0], progress=step)}
    length, axes = float(centred[0].norm()), centred[1]
    if length > 0:
        scale = math.sqrt(count) / length
        log_z = log_partition(weight, axes, scale=scale, dtype=dtypes[1], progress=step)
        partitions["_centred"] = centred_log_partition(log_z, mean, axes, scale)
    measures = {f"i1{suffix}": float(isotropy_i1(log_z)) for suffix, log_z in partitions.items()}
    measures.update({f"i2{suffix}": float(isotropy_i2(z)) for suffix, z in partitions.items()})
    return measures
