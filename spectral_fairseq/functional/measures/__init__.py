"""Measures of embedding tables and of predictions."""

from spectral_fairseq.functional.measures.argmax_words import ArgmaxWords
from spectral_fairseq.functional.measures.convex_hull import hull_probability, separate
from spectral_fairseq.functional.measures.correlation import pearson, slope, spearman
from spectral_fairseq.functional.measures.cosine_histogram import (
    cosine_histogram,
    histogram_quantiles,
    positive_share,
)
from spectral_fairseq.functional.measures.decay_fit import fit_exponential, fit_polynomial
from spectral_fairseq.functional.measures.divergence import ExpectedPairwiseKL
from spectral_fairseq.functional.measures.effective_rank import effective_rank
from spectral_fairseq.functional.measures.gradient_bottleneck import GradientBottleneck
from spectral_fairseq.functional.measures.hidden_states import StateStatistics
from spectral_fairseq.functional.measures.hubness import hubness
from spectral_fairseq.functional.measures.isoscore import covariance_from_gram, isoscore
from spectral_fairseq.functional.measures.mean_cosine import mean_cosine, mean_cosines
from spectral_fairseq.functional.measures.neighbours import nearest_neighbours
from spectral_fairseq.functional.measures.paired_cosine import paired_cosine
from spectral_fairseq.functional.measures.partition_function import (
    NARROW_ROW_NORM,
    centred_log_partition,
    isotropy_i1,
    isotropy_i2,
    log_partition,
    log_partitions,
)
from spectral_fairseq.functional.measures.random_table import random_spectrum, upper_edge
from spectral_fairseq.functional.measures.rank import (
    cumulative_share,
    empirical_rank,
    roundoff_threshold,
)
from spectral_fairseq.functional.measures.robust_outliers import robust_scores
from spectral_fairseq.functional.measures.sampled_partition_function import (
    RowMoments,
    sampled_log_partitions,
)
from spectral_fairseq.functional.measures.spectrum_measures import spectrum_measures
from spectral_fairseq.functional.measures.stable_rank import share_of_first, stable_rank
from spectral_fairseq.functional.measures.table_drift import (
    centred_products,
    linear_cka,
    procrustes_residual,
)
from spectral_fairseq.functional.measures.untrained_rows import untrained_rows

__all__ = [
    "NARROW_ROW_NORM",
    "ArgmaxWords",
    "ExpectedPairwiseKL",
    "GradientBottleneck",
    "RowMoments",
    "StateStatistics",
    "centred_log_partition",
    "centred_products",
    "cosine_histogram",
    "covariance_from_gram",
    "cumulative_share",
    "effective_rank",
    "empirical_rank",
    "fit_exponential",
    "fit_polynomial",
    "histogram_quantiles",
    "hubness",
    "hull_probability",
    "isoscore",
    "isotropy_i1",
    "isotropy_i2",
    "linear_cka",
    "log_partition",
    "log_partitions",
    "mean_cosine",
    "mean_cosines",
    "nearest_neighbours",
    "paired_cosine",
    "pearson",
    "positive_share",
    "procrustes_residual",
    "random_spectrum",
    "robust_scores",
    "roundoff_threshold",
    "sampled_log_partitions",
    "separate",
    "share_of_first",
    "slope",
    "spearman",
    "spectrum_measures",
    "stable_rank",
    "untrained_rows",
    "upper_edge",
]
