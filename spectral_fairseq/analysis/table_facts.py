"""What several measures of one table have in common, each computed when it is first needed."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.analysis.callback import StepCallback
from spectral_fairseq.analysis.options import Options
from spectral_fairseq.checkpoints.dictionary import WordList
from spectral_fairseq.checkpoints.tables import StoredTable
from spectral_fairseq.errors import DataError
from spectral_fairseq.functional.counts import smoothed_log_counts
from spectral_fairseq.functional.linalg.row_blocks import row_blocks
from spectral_fairseq.functional.linalg.row_norms import row_norms
from spectral_fairseq.functional.linalg.singular_values import right_singular_system
from spectral_fairseq.functional.measures.cosine_histogram import (
    cosine_histogram,
    histogram_quantiles,
)
from spectral_fairseq.functional.measures.decay_fit import fit_exponential, fit_polynomial
from spectral_fairseq.functional.measures.isoscore import covariance_from_gram
from spectral_fairseq.functional.measures.mean_cosine import mean_cosine
from spectral_fairseq.functional.measures.partition_function import (
    NARROW_ROW_NORM,
    isotropy_i1,
    isotropy_i2,
    log_partitions,
)
from spectral_fairseq.functional.penalties.spectrum import prior_spectrum

COSINE_BINS = 100
_SUM_BLOCK_ROWS = 16384


class Isotropy(NamedTuple):
    """I1 and I2 by each convention of the signs and the scale.

    Attributes:
        means: such as ``i1_unit_scale`` -> its value, or its mean over the samples.
        samples: the same -> one value for each sample; None where all words were taken at once.
    """

    means: Dict[str, float]
    samples: Optional[Dict[str, List[float]]]


class TableFacts:
    """Shared intermediate results for the measures of one table.

    Args:
        table: the table, without rows that stand for no word.
        options: what is sampled, and how.
        words: the dictionary of the table's rows.
        prior: arguments of the prior that the table was trained with, for ``prior_spectrum``.
        progress: called at each step.

    Raises:
        DataError: by any attribute, if the table cannot be measured.
    """

    def __init__(
        self,
        table: StoredTable,
        options: Options,
        words: Optional[WordList] = None,
        prior: Optional[Mapping[str, Any]] = None,
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
        wide = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        blocks = row_blocks(self.weight, dtype=wide)
        norms = torch.cat([row_norms(block) for block in blocks]).double()
        if not torch.isfinite(norms).all():  # though every entry is finite: their squares are not
            raise DataError(
                f"vectors in {self.table.name} whose lengths are numbers in {self.table.dtype}",
                f"{int((~torch.isfinite(norms)).sum())} of {self.count} that are too long, with "
                f"entries up to {max(abs(float(end)) for end in self.weight.aminmax()):.3g}",
                "Training diverged, or the file is damaged: take an earlier checkpoint.",
            )
        return norms

    @cached_property
    def _singular_system(self) -> Tuple[Tensor, Tensor]:
        self.progress.begin("singular values", self.count)
        sigma, directions = right_singular_system(self.weight, progress=self.progress.advance)
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
        total = torch.zeros(self.dim, dtype=torch.float64)
        for block in self.weight.split(_SUM_BLOCK_ROWS):
            total += block.double().sum(0)
        return total / self.count

    @cached_property
    def covariance(self) -> Tensor:
        """Covariance matrix of the rows, shape (d, d), float64."""
        gram = (self.directions * self.sigma.square()) @ self.directions.t()
        return covariance_from_gram(gram, self.mean * self.count, self.count)

    @cached_property
    def isotropy(self) -> Isotropy:
        """I1 and I2 of all words, or averaged over random samples."""
        count, wanted, progress = self.count, self.options.isotropy_words, self.progress
        everything = not wanted or wanted >= count
        # See functional/measures/partition_function.py, Note [Z in float32]. All words of a float32
        # table are worth float64; numbers of 16 bits have fewer digits than float32 keeps.
        few_digits = self.weight.element_size() <= (2 if everything else 4)
        narrow = few_digits and float(self.norms.max()) <= NARROW_ROW_NORM
        dtype = torch.float32 if narrow else torch.float64
        if everything:
            sigma, directions = self._singular_system
            progress.begin("partition function", count)
            return Isotropy(_isotropy(self.weight, sigma, directions, dtype, progress), None)
        progress.begin("partition function", 2 * wanted * self.options.isotropy_runs)
        runs = []
        for run in range(self.options.isotropy_runs):
            sample = self.weight[sample_rows(count, wanted, self.options.seed + run)]
            system = right_singular_system(sample, progress=progress.advance)
            runs.append(_isotropy(sample, *system, dtype, progress))
        samples = {key: [run[key] for run in runs] for key in runs[0]}
        return Isotropy({key: sum(v) / len(v) for key, v in samples.items()}, samples)

    @cached_property
    def mean_cosine(self) -> float:
        """Mean cosine over all pairs of different rows."""
        self.progress.begin("cosines")
        return mean_cosine(self.weight)

    @cached_property
    def cosine_histogram(self) -> Tuple[List[float], List[int], int]:
        """Edges and counts of the cosines between the sampled words, and the number of words."""
        sampled = sample_rows(self.count, self.options.cosine_words, self.options.seed)
        return (*cosine_histogram(self.weight[sampled], COSINE_BINS), len(sampled))

    @cached_property
    def cosine_quantiles(self) -> List[float]:
        """5th, 50th and 95th percentile of the cosines between the sampled words."""
        edges, counts, _ = self.cosine_histogram
        return list(histogram_quantiles(edges, counts, (0.05, 0.5, 0.95)))

    @cached_property
    def cosine_std(self) -> float:
        """Standard deviation of the cosines between the sampled words."""
        edges, counts, _ = self.cosine_histogram
        centres = torch.tensor(edges, dtype=torch.float64).unfold(0, 2, 1).mean(1)
        share = torch.tensor(counts, dtype=torch.float64) / sum(counts)
        mean = float((share * centres).sum())
        return math.sqrt(float((share * (centres - mean).square()).sum()))

    @cached_property
    def fits(self) -> Dict[str, Dict[str, float]]:
        """Exponential and polynomial decay fitted to the spectrum; empty in one dimension."""
        self.progress.begin("decay fits")
        if self.dim == 1:
            return {}
        return {
            "exponential": fit_exponential(self.sigma),
            "polynomial": fit_polynomial(self.sigma),
        }

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
    def prior_sigma(self) -> Optional[Tensor]:
        """Singular values of the prior that the table was trained with, shape (d,)."""
        norm = self.table.initial_norm
        if self._prior is None or (self._prior.get("c1") is None and norm is None):
            return None
        return prior_spectrum(dim=self.dim, frobenius_norm=norm, dtype=torch.float64, **self._prior)


def sample_rows(count: int, wanted: int, seed: int) -> Tensor:
    """``wanted`` of ``count`` rows, uniformly, without repetition, in ascending order.

    All of them where ``wanted`` is not smaller.
    """
    if wanted >= count:
        return torch.arange(count)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=generator)[:wanted].sort().values


def _isotropy(
    weight: Tensor,
    sigma: Tensor,
    directions: Tensor,
    dtype: torch.dtype,
    progress: StepCallback,
) -> Dict[str, float]:
    """I1 and I2 by each convention of partition_function.py, Note [Sign and scale of I1 and I2]."""
    root_mean_square = float(sigma.norm()) / math.sqrt(weight.size(0))
    scales = (1.0, 1 / root_mean_square)
    as_is, unit = log_partitions(weight, directions, scales, dtype=dtype, progress=progress.advance)
    found = {}
    for suffix, log_z in (("", as_is), ("_one_sign", as_is[0]), ("_unit_scale", unit)):
        found[f"i1{suffix}"] = float(isotropy_i1(log_z))
        found[f"i2{suffix}"] = float(isotropy_i2(log_z))
    return found
