"""All measures of one table, from the definitions in :mod:`spectral_fairseq.functional`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from spectral_fairseq.analysis.progress import Progress
from spectral_fairseq.checkpoints.dictionary import WordList
from spectral_fairseq.checkpoints.tables import StoredTable
from spectral_fairseq.errors import ConfigurationError, DataError
from spectral_fairseq.functional.counts import smoothed_log_counts
from spectral_fairseq.functional.linalg.row_norms import row_norms
from spectral_fairseq.functional.linalg.singular_values import right_singular_system
from spectral_fairseq.functional.measures.correlation import pearson, slope, spearman
from spectral_fairseq.functional.measures.cosine_histogram import (
    cosine_histogram,
    histogram_quantiles,
)
from spectral_fairseq.functional.measures.decay_fit import fit_exponential, fit_polynomial
from spectral_fairseq.functional.measures.isoscore import covariance_from_gram, isoscore
from spectral_fairseq.functional.measures.mean_cosine import mean_cosine
from spectral_fairseq.functional.measures.neighbours import nearest_neighbours
from spectral_fairseq.functional.measures.partition_function import (
    NARROW_ROW_NORM,
    isotropy_i1,
    isotropy_i2,
    log_partitions,
)
from spectral_fairseq.functional.measures.spectrum_measures import spectrum_measures
from spectral_fairseq.functional.penalties.spectrum import prior_spectrum

NORM_BINS = 60
COSINE_BINS = 100


@dataclass
class Options:
    """What decides the numbers; part of every signature.

    Attributes:
        seed: of all samples.
        isotropy_words: words of a sample for I1 and I2; 0 takes all words, once.
        isotropy_runs: samples, whose I1 and I2 are averaged.
        cosine_words: words whose pairs make the distribution of cosines; fewer if N is smaller.
        projection_words: words drawn in the projection.
        projection: ``svd`` projects on the first two right singular vectors, ``pca`` subtracts
            the mean first.
        neighbours: neighbours of each word.
        words: whose neighbours are listed.
    """

    seed: int = 1
    isotropy_words: int = 0
    isotropy_runs: int = 10
    cosine_words: int = 4000
    projection_words: int = 4000
    projection: str = "svd"
    neighbours: int = 10
    words: Sequence[str] = field(default_factory=tuple)

    def check(self) -> None:
        """Refuse impossible values.

        Raises:
            ConfigurationError: an option outside its range.
        """
        least = {"isotropy_words": 0, "isotropy_runs": 1, "cosine_words": 2,
                 "projection_words": 2, "neighbours": 1}  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            if value < low:
                raise ConfigurationError(
                    f"--{name.replace('_', '-')} to be at least {low}", str(value), "Correct it."
                )
        if not 0 <= self.seed < 2**63:
            raise ConfigurationError("--seed between 0 and 2^63 - 1", str(self.seed), "Correct it.")


@dataclass
class Measured:
    """What was found out about one table.

    Attributes:
        measures: key of :mod:`catalogue` -> value, None where it does not apply.
        details: curves and lists, ready for JSON.
        projection: coordinates of the sampled words, shape (m, 2), for the picture only.
        projection_rank: their places in the order of frequency, shape (m,).
    """

    measures: Dict[str, Optional[float]]
    details: Dict[str, Any]
    projection: Tensor
    projection_rank: Tensor


def measure_table(
    table: StoredTable,
    options: Options,
    words: Optional[WordList] = None,
    prior: Optional[Dict[str, Any]] = None,
    progress: Optional[Progress] = None,
) -> Measured:
    """Measure one table.

    Args:
        table: of :func:`extract_table`.
        options: what is sampled, and how.
        words: the dictionary of the table's rows.
        prior: arguments of the prior the table was trained with, for ``prior_spectrum``.
        progress: follows the steps.

    Raises:
        DataError: a table that cannot be measured, or words that are not in the dictionary.
    """
    options.check()
    progress = progress or Progress()
    queries = _query_rows(table, options, words)
    weight = table.weight
    count, dim = weight.shape
    measures: Dict[str, Optional[float]] = {}
    norms = row_norms(weight).double()
    if not torch.isfinite(norms).all():  # though every entry is: their squares are not
        raise DataError(
            f"vectors in {table.name} whose lengths are numbers in {table.dtype}",
            f"{int((~torch.isfinite(norms)).sum())} of {count} that are too long, with entries up "
            f"to {float(weight.abs().max()):.3g}",
            "Training diverged, or the file is damaged: take an earlier checkpoint.",
        )

    progress.begin("singular values", count)
    sigma, directions = right_singular_system(weight, progress=progress.advance)
    if float(sigma[0]) == 0:
        raise DataError(
            f"word vectors in {table.name}", "zeros only", "Choose a trained checkpoint or table."
        )
    measures.update(spectrum_measures(sigma))
    gram = (directions * sigma.square()) @ directions.t()
    covariance = covariance_from_gram(gram, _row_sum(weight), count)
    measures["isoscore"] = isoscore(covariance) if dim > 1 else None

    isotropy, runs = _isotropy(weight, sigma, directions, float(norms.max()), options, progress)
    measures.update(isotropy)

    progress.begin("cosines")
    measures["mean_cosine"] = mean_cosine(weight)
    sampled = sample_rows(count, options.cosine_words, options.seed)
    edges, counts = cosine_histogram(weight[sampled], COSINE_BINS)
    measures.update(_cosine_statistics(weight[sampled], edges, counts))

    progress.begin("decay fits")
    fits: Dict[str, Any] = {}
    if dim > 1:
        fits = {"exponential": fit_exponential(sigma), "polynomial": fit_polynomial(sigma)}
    for kind, fit in fits.items():
        for name, value in fit.items():
            measures[f"{kind}_{name.replace('relative_', '')}"] = value

    progress.begin("norms and neighbours")
    measures.update(_norm_statistics(norms, table, words))
    measures.update(table.orthogonality)
    prior_sigma = _prior(prior, table, dim)
    if table.stored_sigma is not None:
        difference = table.stored_sigma - sigma
        measures["stored_sigma_error"] = float(difference.norm() / sigma.norm())
    if prior_sigma is not None:
        measures["prior_error"] = float((sigma - prior_sigma).norm() / prior_sigma.norm())
    order = frequency_order(table, words)
    projection, rank = _projection(weight, directions, covariance, order, options)
    details = {
        "singular_values": sigma.tolist(),
        "prior": None if prior_sigma is None else prior_sigma.tolist(),
        "fits": fits,
        "isotropy_runs": runs,
        "cosines": {"edges": edges, "counts": counts, "words": len(sampled)},
        "norms": _norm_curve(norms[order]),
        "frequency_order": "counts" if words and words.has_counts else "rows",
        "neighbours": _neighbours(table, words, queries, options),
    }
    return Measured(measures, details, projection, rank)


def sample_rows(count: int, wanted: int, seed: int) -> Tensor:
    """``wanted`` of ``count`` rows, uniformly, without repetition, in ascending order.

    All of them where ``wanted`` is not smaller.
    """
    if wanted >= count:
        return torch.arange(count)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=generator)[:wanted].sort().values


def frequency_order(table: StoredTable, words: Optional[WordList]) -> Tensor:
    """Rows of ``table.weight``, the most frequent word first, shape (N,).

    Without counts it is the order of the rows, which fairseq-preprocess sorts by frequency.
    """
    if words is None or not words.has_counts:
        return torch.arange(len(table.rows))
    counts = torch.tensor(words.counts)[table.rows]
    return torch.sort(counts, descending=True, stable=True).indices


def _isotropy(
    weight: Tensor,
    sigma: Tensor,
    directions: Tensor,
    longest: float,
    options: Options,
    progress: Progress,
) -> Tuple[Dict[str, Optional[float]], Optional[Dict[str, Any]]]:
    count, wanted = weight.size(0), options.isotropy_words
    if not wanted or wanted >= count:
        progress.begin("partition function", count)
        return _isotropy_of(weight, sigma, directions, torch.float64, progress), None
    # See functional/measures/partition_function.py, Note [Z in float32].
    narrow = weight.dtype == torch.float32 and longest <= NARROW_ROW_NORM
    dtype = torch.float32 if narrow else torch.float64
    progress.begin("partition function", 2 * wanted * options.isotropy_runs)
    runs: List[Dict[str, Optional[float]]] = []
    for run in range(options.isotropy_runs):
        sample = weight[sample_rows(count, wanted, options.seed + run)]
        system = right_singular_system(sample, progress=progress.advance)
        runs.append(_isotropy_of(sample, *system, dtype, progress))
    values = {key: [float(run[key] or 0.0) for run in runs] for key in runs[0]}
    means: Dict[str, Optional[float]] = {key: sum(v) / len(v) for key, v in values.items()}
    return means, {"words": wanted, "values": values}


def _isotropy_of(
    weight: Tensor, sigma: Tensor, directions: Tensor, dtype: torch.dtype, progress: Progress
) -> Dict[str, Optional[float]]:
    """I1 and I2 by each convention of partition_function.py, Note [Sign and scale of I1 and I2]."""
    root_mean_square = float(sigma.norm()) / math.sqrt(weight.size(0))
    scales = (1.0, 1 / root_mean_square)
    as_is, unit = log_partitions(weight, directions, scales, dtype=dtype, progress=progress.advance)
    found: Dict[str, Optional[float]] = {}
    for suffix, log_z in (("", as_is), ("_one_sign", as_is[0]), ("_unit_scale", unit)):
        found[f"i1{suffix}"] = float(isotropy_i1(log_z))
        found[f"i2{suffix}"] = float(isotropy_i2(log_z))
    return found


def _row_sum(weight: Tensor) -> Tensor:
    total = torch.zeros(weight.size(1), dtype=torch.float64)
    for block in weight.split(16384):
        total += block.double().sum(0)
    return total


def _cosine_statistics(
    sample: Tensor, edges: List[float], counts: List[int]
) -> Dict[str, Optional[float]]:
    total = sum(counts)
    centres = torch.tensor(edges, dtype=torch.float64).unfold(0, 2, 1).mean(1)
    share = torch.tensor(counts, dtype=torch.float64) / total
    mean = float((share * centres).sum())
    variance = float((share * (centres - mean).square()).sum())
    low, middle, high = histogram_quantiles(edges, counts, (0.05, 0.5, 0.95))
    return {
        "cosine_std": math.sqrt(variance),
        "cosine_p05": low,
        "cosine_p50": middle,
        "cosine_p95": high,
    }


def _norm_statistics(
    norms: Tensor, table: StoredTable, words: Optional[WordList]
) -> Dict[str, Optional[float]]:
    found: Dict[str, Optional[float]] = {
        "norm_mean": float(norms.mean()),
        "norm_std": float(norms.std(unbiased=False)),
        "norm_min": float(norms.min()),
        "norm_max": float(norms.max()),
    }
    if words is None or not words.has_counts:
        return found
    log_counts = smoothed_log_counts(words.counts)[table.rows].double()
    for name, statistic in (("pearson", pearson), ("spearman", spearman)):
        value = statistic(log_counts, norms)
        found[f"norm_count_{name}"] = value if math.isfinite(value) else None
    gradient = slope(log_counts, norms)
    found["norm_count_slope"] = gradient if math.isfinite(gradient) else None
    return found


def _norm_curve(ordered: Tensor) -> Dict[str, List[float]]:
    """Mean row norm in bins of frequency rank, equally wide in its logarithm where they can be."""
    count = len(ordered)
    cuts = torch.logspace(0, math.log10(count + 1), NORM_BINS + 1, dtype=torch.float64)
    bounds = sorted({min(int(round(cut)), count + 1) for cut in cuts.tolist()})
    rank, mean, low, high = [], [], [], []
    for start, end in zip(bounds, bounds[1:]):
        part = ordered[start - 1 : end - 1]
        rank.append(math.sqrt(start * (end - 1)))
        mean.append(float(part.mean()))
        low.append(float(part.quantile(0.1)))
        high.append(float(part.quantile(0.9)))
    return {"rank": rank, "mean": mean, "p10": low, "p90": high}


def _projection(
    weight: Tensor, directions: Tensor, covariance: Tensor, order: Tensor, options: Options
) -> Tuple[Tensor, Tensor]:
    count, dim = weight.shape
    if options.projection == "pca":
        axes = torch.linalg.eigh(covariance).eigenvectors.flip(1)[:, :2]
    else:
        axes = directions[:, :2]
    mean = _row_sum(weight) / count
    axes = axes * torch.where(mean @ axes < 0, -1.0, 1.0)  # a sign that does not vary by machine
    rank = torch.empty_like(order)
    rank[order] = torch.arange(1, count + 1)
    sampled = sample_rows(count, options.projection_words, options.seed)
    points = weight[sampled].double()
    if options.projection == "pca":
        points = points - mean
    points = points @ axes
    if dim == 1:
        points = torch.cat([points, torch.zeros_like(points)], 1)
    return points, rank[sampled]


def _prior(prior: Optional[Dict[str, Any]], table: StoredTable, dim: int) -> Optional[Tensor]:
    if prior is None:
        return None
    norm = table.initial_norm
    if prior.get("c1") is None and norm is None:
        return None
    return prior_spectrum(dim=dim, frobenius_norm=norm, dtype=torch.float64, **prior)


def _query_rows(table: StoredTable, options: Options, words: Optional[WordList]) -> Dict[str, int]:
    """Words of ``--words`` -> row of ``table.weight``."""
    if options.words and words is None:
        raise ConfigurationError(
            "a dictionary for --words", "none", "Give it with --dict, a file or a data folder."
        )
    place = {row: index for index, row in enumerate(table.rows.tolist())} if options.words else {}
    found: Dict[str, int] = {}
    for word in options.words:
        row = words.row_of(word) if words is not None else None
        if row is None or row not in place:
            bare = word.strip("@\u2581") or word
            near = [s for s in (words.symbols if words else []) if bare in s][:5]
            raise DataError(
                f"the word {word!r} in {words.path if words else 'the dictionary'}",
                f"only words such as {', '.join(near)}" if near else "nothing like it",
                "Words are spelled as in dict.txt: with subword marks such as @@ or \u2581.",
            )
        found[word] = place[row]
    return found


def _neighbours(
    table: StoredTable, words: Optional[WordList], queries: Dict[str, int], options: Options
) -> Dict[str, List[Dict[str, Any]]]:
    if not queries or words is None:
        return {}
    rows = torch.tensor(list(queries.values()))
    cosines, found = nearest_neighbours(table.weight, rows, options.neighbours)
    return {
        word: [
            {"word": words.symbols[int(table.rows[at])], "cosine": float(cosine)}
            for cosine, at in zip(cosines[index], found[index])
        ]
        for index, word in enumerate(queries)
    }
