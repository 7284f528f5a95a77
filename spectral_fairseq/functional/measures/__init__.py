"""Measures of embedding tables and of predictions."""

from spectral_fairseq.functional.measures.correlation import pearson, slope, spearman
from spectral_fairseq.functional.measures.cosine_histogram import (
    cosine_histogram,
    histogram_quantiles,
)
from spectral_fairseq.functional.measures.decay_fit import fit_exponential, fit_polynomial
from spectral_fairseq.functional.measures.divergence import ExpectedPairwiseKL
from spectral_fairseq.functional.measures.effective_rank import effective_rank
from spectral_fairseq.functional.measures.isoscore import covariance_from_gram, isoscore
from spectral_fairseq.functional.measures.mean_cosine import mean_cosine
from spectral_fairseq.functional.measures.neighbours import nearest_neighbours
from spectral_fairseq.functional.measures.partition_function import (
    NARROW_ROW_NORM,
    isotropy_i1,
    isotropy_i2,
    log_partition,
    log_partitions,
)
from spectral_fairseq.functional.measures.rank import (
    cumulative_share,
    empirical_rank,
    roundoff_threshold,
)
from spectral_fairseq.functional.measures.spectrum_measures import spectrum_measures
from spectral_fairseq.functional.measures.stable_rank import share_of_first, stable_rank

__all__ = [
    "NARROW_ROW_NORM",
    "ExpectedPairwiseKL",
    "cosine_histogram",
    "covariance_from_gram",
    "cumulative_share",
    "effective_rank",
    "empirical_rank",
    "fit_exponential",
    "fit_polynomial",
    "histogram_quantiles",
    "isoscore",
    "isotropy_i1",
    "isotropy_i2",
    "log_partition",
    "log_partitions",
    "mean_cosine",
    "nearest_neighbours",
    "pearson",
    "roundoff_threshold",
    "share_of_first",
    "slope",
    "spearman",
    "spectrum_measures",
    "stable_rank",
]
