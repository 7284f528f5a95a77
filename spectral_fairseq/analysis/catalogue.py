"""Every measure of a report: its key, title, unit, meaning, which direction is good, its source.

Tables in text, LaTeX and HTML, the JSON schema and the measuring itself all follow from this list,
so a new measure is a function in :mod:`spectral_fairseq.functional.measures`, an entry here, and a
test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable, Dict, List, Mapping, Optional, Sequence

from torch import Tensor

from spectral_fairseq.analysis.table_facts import TableFacts
from spectral_fairseq.functional.measures.correlation import pearson, slope, spearman
from spectral_fairseq.functional.measures.effective_rank import effective_rank
from spectral_fairseq.functional.measures.isoscore import isoscore
from spectral_fairseq.functional.measures.stable_rank import share_of_first, stable_rank


@dataclass(frozen=True)
class Measure:
    """One number of a report.

    Attributes:
        key: in ``measures`` of the JSON.
        title: for readers.
        latex: the title in LaTeX.
        meaning: definition, convention and range.
        compute: the value for one table, None where it does not apply; None for a measure of
            predictions or translations, which :mod:`tools` adds under this key.
        better: ``high`` or ``low`` values are nearer to isotropy; empty for neither.
        unit: empty for a pure number.
        headline: whether the report opens with it.
        digits: significant digits shown.
    """

    key: str
    title: str
    latex: str
    meaning: str
    compute: Optional[Callable[[TableFacts], Optional[float]]]
    better: str = ""
    unit: str = ""
    headline: bool = False
    digits: int = 4


def _with_counts(
    facts: TableFacts, statistic: Callable[[Tensor, Tensor], float]
) -> Optional[float]:
    return None if facts.log_counts is None else statistic(facts.log_counts, facts.norms)


def _fitted(facts: TableFacts, kind: str, parameter: str) -> Optional[float]:
    return facts.fits.get(kind, {}).get(parameter)


def _stored_sigma_error(facts: TableFacts) -> Optional[float]:
    stored = facts.table.stored_sigma
    return None if stored is None else float((stored - facts.sigma).norm() / facts.sigma.norm())


def _prior_error(facts: TableFacts) -> Optional[float]:
    prior = facts.prior_sigma
    return None if prior is None else float((facts.sigma - prior).norm() / prior.norm())


GROUPS: Dict[str, List[Measure]] = {
    "Isotropy": [
        Measure(
            "i1",
            "I1",
            "$I_1$",
            "min Z(a) / max Z(a), where Z(a) = sum_i exp(<w_i, a>) and a runs over both "
            "signs of every eigenvector of W'W, at W's own scale; 1 is isotropic",
            lambda t: t.isotropy.means["i1"],
            better="high",
        ),
        Measure(
            "i2",
            "I2",
            "$I_2$",
            "standard deviation of Z(a) / mean of Z(a), over the same directions; 0 is isotropic",
            lambda t: t.isotropy.means["i2"],
            better="low",
        ),
        Measure(
            "i1_one_sign",
            "I1, one sign",
            "$I_1$, one sign",
            "I1 over one direction for each eigenvector, the one along the mean of the rows",
            lambda t: t.isotropy.means["i1_one_sign"],
            better="high",
        ),
        Measure(
            "i2_one_sign",
            "I2, one sign",
            "$I_2$, one sign",
            "I2 over one direction for each eigenvector, the one along the mean of the rows",
            lambda t: t.isotropy.means["i2_one_sign"],
            better="low",
        ),
        Measure(
            "i1_unit_scale",
            "I1, unit scale",
            "$I_1$, unit scale",
            "I1 of W divided by the root mean square of its row norms, which makes tables"
            " of different scale comparable",
            lambda t: t.isotropy.means["i1_unit_scale"],
            better="high",
            headline=True,
        ),
        Measure(
            "i2_unit_scale",
            "I2, unit scale",
            "$I_2$, unit scale",
            "I2 of W divided by the root mean square of its row norms",
            lambda t: t.isotropy.means["i2_unit_scale"],
            better="low",
        ),
        Measure(
            "isoscore",
            "IsoScore",
            "IsoScore",
            "uniformity of the eigenvalues of the covariance (Rudman et al. 2022), mean "
            "subtracted; 1 is isotropic, 0 a line",
            lambda t: isoscore(t.covariance) if t.dim > 1 else None,
            better="high",
        ),
    ],
    "Cosines": [
        Measure(
            "mean_cosine",
            "mean cosine",
            "mean cosine",
            "mean over all pairs of different words, exact; 0 if the words share no "
            "direction, 1 if they all point the same way",
            lambda t: t.mean_cosine,
            better="low",
            headline=True,
        ),
        Measure(
            "cosine_std",
            "cosine, standard deviation",
            "cosine, std.",
            "standard deviation over the pairs of the sampled words",
            lambda t: t.cosine_std,
        ),
        Measure(
            "cosine_p05",
            "cosine, 5th percentile",
            "cosine, 5\\,\\%",
            "5th percentile over the pairs of the sampled words",
            lambda t: t.cosine_quantiles[0],
        ),
        Measure(
            "cosine_p50",
            "cosine, median",
            "cosine, median",
            "median over the pairs of the sampled words",
            lambda t: t.cosine_quantiles[1],
        ),
        Measure(
            "cosine_p95",
            "cosine, 95th percentile",
            "cosine, 95\\,\\%",
            "95th percentile over the pairs of the sampled words",
            lambda t: t.cosine_quantiles[2],
        ),
        Measure(
            "mean_share",
            "norm of the mean vector",
            "$\\|\\bar w\\|$, relative",
            "norm of the mean of all rows, divided by the root mean square of the row norms; 0 to "
            "1. A vector added to all rows of an output table changes no probability",
            lambda t: float(t.mean.norm()) / t.rms_norm,
            better="low",
        ),
    ],
    "Spectrum": [
        Measure(
            "sigma_max",
            "sigma_1",
            "$\\sigma_1$",
            "largest singular value of W",
            lambda t: float(t.sigma[0]),
        ),
        Measure(
            "sigma_2",
            "sigma_2",
            "$\\sigma_2$",
            "second largest singular value of W",
            lambda t: float(t.sigma[1]) if t.dim > 1 else 0.0,
        ),
        Measure(
            "sigma_median",
            "sigma, median",
            "$\\sigma$, median",
            "median singular value of W (the lower of the two middle ones)",
            lambda t: float(t.sigma.median()),
        ),
        Measure(
            "sigma_min",
            "sigma_d",
            "$\\sigma_d$",
            "smallest singular value of W; 0 if it cannot be told from roundoff",
            lambda t: float(t.sigma[-1]),
        ),
        Measure(
            "frobenius_norm",
            "Frobenius norm",
            "$\\|W\\|_F$",
            "sqrt(sum_k sigma_k^2)",
            lambda t: float(t.sigma.norm()),
        ),
        Measure(
            "share_of_first",
            "share of sigma_1",
            "$\\sigma_1/\\sum\\sigma_k$",
            "sigma_1 / sum_k sigma_k; 1/d for a flat spectrum",
            lambda t: share_of_first(t.sigma),
            better="low",
            headline=True,
        ),
        Measure(
            "effective_rank",
            "effective rank",
            "effective rank",
            "exp of the entropy of sigma_k / sum sigma (Roy and Vetterli 2007), between 1 and d",
            lambda t: effective_rank(t.sigma),
            better="high",
            headline=True,
        ),
        Measure(
            "stable_rank",
            "stable rank",
            "stable rank",
            "sum_k sigma_k^2 / sigma_1^2, between 1 and d",
            lambda t: stable_rank(t.sigma),
            better="high",
        ),
    ],
    "Decay fitted to the spectrum": [
        Measure(
            "exponential_c1",
            "exponential, c1",
            "exp., $c_1$",
            "c1 of c1 exp(-c2 k^gamma), fitted to sigma_k by least squares",
            lambda t: _fitted(t, "exponential", "c1"),
        ),
        Measure(
            "exponential_c2",
            "exponential, c2",
            "exp., $c_2$",
            "c2 of that fit",
            lambda t: _fitted(t, "exponential", "c2"),
        ),
        Measure(
            "exponential_gamma",
            "exponential, gamma",
            "exp., $\\gamma$",
            "gamma of that fit; 0.1 is its lower bound, where a spectrum decays polynomially",
            lambda t: _fitted(t, "exponential", "gamma"),
        ),
        Measure(
            "exponential_error",
            "exponential, relative error",
            "exp., rel.\\ error",
            "||sigma - fit|| / ||sigma||",
            lambda t: _fitted(t, "exponential", "relative_error"),
            better="low",
        ),
        Measure(
            "polynomial_c1",
            "polynomial, c1",
            "pol., $c_1$",
            "c1 of c1 k^-gamma, fitted to sigma_k by least squares",
            lambda t: _fitted(t, "polynomial", "c1"),
        ),
        Measure(
            "polynomial_gamma",
            "polynomial, gamma",
            "pol., $\\gamma$",
            "gamma of that fit",
            lambda t: _fitted(t, "polynomial", "gamma"),
        ),
        Measure(
            "polynomial_error",
            "polynomial, relative error",
            "pol., rel.\\ error",
            "||sigma - fit|| / ||sigma||",
            lambda t: _fitted(t, "polynomial", "relative_error"),
            better="low",
        ),
    ],
    "Row norms": [
        Measure(
            "norm_mean",
            "row norm, mean",
            "$\\|w\\|$, mean",
            "mean of ||w_i||",
            lambda t: float(t.norms.mean()),
        ),
        Measure(
            "norm_std",
            "row norm, standard deviation",
            "$\\|w\\|$, std.",
            "standard deviation of ||w_i||",
            lambda t: float(t.norms.std(unbiased=False)),
        ),
        Measure(
            "norm_min",
            "row norm, smallest",
            "$\\|w\\|$, min",
            "smallest ||w_i||",
            lambda t: float(t.norms.min()),
        ),
        Measure(
            "norm_max",
            "row norm, largest",
            "$\\|w\\|$, max",
            "largest ||w_i||",
            lambda t: float(t.norms.max()),
        ),
        Measure(
            "norm_count_pearson",
            "norm and log count, Pearson",
            "norm/log count, $r$",
            "Pearson correlation of ||w_i|| with the smoothed log count of word i in the "
            "dictionary",
            lambda t: _with_counts(t, pearson),
        ),
        Measure(
            "norm_count_spearman",
            "norm and log count, Spearman",
            "norm/log count, $\\rho$",
            "Spearman correlation of the same two",
            lambda t: _with_counts(t, spearman),
        ),
        Measure(
            "norm_count_slope",
            "norm over log count, slope",
            "norm/log count, slope",
            "slope of the least-squares line of ||w_i|| over the smoothed log count",
            lambda t: _with_counts(t, slope),
        ),
    ],
    "Factors of an SVD table": [
        Measure(
            "u_frobenius",
            "||U'U - I||_F",
            "$\\|U'U-I\\|_F$",
            "distance of the stored U from orthonormal columns, Frobenius norm",
            lambda t: t.table.orthogonality.get("u_frobenius"),
            better="low",
        ),
        Measure(
            "u_spectral",
            "||U'U - I||_2",
            "$\\|U'U-I\\|_2$",
            "distance of the stored U from orthonormal columns, spectral norm",
            lambda t: t.table.orthogonality.get("u_spectral"),
            better="low",
        ),
        Measure(
            "v_frobenius",
            "||V'V - I||_F",
            "$\\|V'V-I\\|_F$",
            "distance of the stored V from orthonormal columns, Frobenius norm",
            lambda t: t.table.orthogonality.get("v_frobenius"),
            better="low",
        ),
        Measure(
            "v_spectral",
            "||V'V - I||_2",
            "$\\|V'V-I\\|_2$",
            "distance of the stored V from orthonormal columns, spectral norm",
            lambda t: t.table.orthogonality.get("v_spectral"),
            better="low",
        ),
        Measure(
            "stored_sigma_error",
            "stored sigma, relative error",
            "stored $\\sigma$, error",
            "||learned sigma - true singular values|| / ||true||; 0 while U and V are orthonormal",
            _stored_sigma_error,
            better="low",
        ),
        Measure(
            "prior_error",
            "distance from the prior",
            "prior, rel.\\ error",
            "||true singular values - prior of the training|| / ||prior||",
            _prior_error,
            better="low",
        ),
    ],
    "Predictions on data": [
        Measure(
            "log_probability_rank",
            "rank of log P",
            "rank of $\\log P$",
            "number of singular values of the contexts x words log-probability matrix "
            "above the expected roundoff, 1/2 sqrt(m + n + 1) sigma_1 eps",
            None,
            digits=6,
        ),
        Measure(
            "expected_pairwise_kl",
            "expected pairwise KL",
            "expected pairwise KL",
            "mean KL(P(.|c) || P(.|c')) over all pairs of different contexts",
            None,
            unit="nats",
        ),
    ],
    "Sentence-level BLEU of the n best": [
        Measure(
            f"bleu_{order}_{side}",
            f"BLEU-{order} {side}",
            f"BLEU-{order} {side}",
            f"mean over {each} of the best smoothed sentence BLEU against any {other}, then over "
            "sentences, between 0 and 1",
            None,
        )
        for order in (1, 2, 3, 4)
        for side, each, other in (
            ("precision", "hypotheses", "reference"),
            ("recall", "references", "hypothesis"),
        )
    ],
}

ALL: List[Measure] = [measure for group in GROUPS.values() for measure in group]


def measure_all(facts: TableFacts) -> Dict[str, Optional[float]]:
    """Every measure of one table: key -> value, None where it does not apply.

    Args:
        facts: of the table.

    Raises:
        DataError: the table cannot be measured.
    """
    values = {one.key: one.compute(facts) for one in ALL if one.compute is not None}
    # A correlation with a constant is not a number.
    return {k: v if v is None or math.isfinite(v) else None for k, v in values.items()}


def shown(value: Optional[float], digits: int = 4) -> str:
    """A number for readers; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}g}"


def groups_in_use(measured: Sequence[Mapping[str, Optional[float]]]) -> Dict[str, List[Measure]]:
    """The measures that at least one checkpoint has a value of, in groups."""
    kept = {
        group: [m for m in measures if any(found.get(m.key) is not None for found in measured)]
        for group, measures in GROUPS.items()
    }
    return {group: measures for group, measures in kept.items() if measures}
