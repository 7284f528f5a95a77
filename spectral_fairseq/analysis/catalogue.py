"""Every measure of a report: its key, title, meaning, random value, and which direction is good.

Tables in text and HTML and the measuring itself follow from this list, so a new measure is a
function in :mod:`spectral_fairseq.functional`, an entry here, and a test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Union

from torch import Tensor

from spectral_fairseq.analysis.table_facts import GROUPS as FREQUENCIES
from spectral_fairseq.analysis.table_facts import TableFacts
from spectral_fairseq.functional.correlation import pearson, slope
from spectral_fairseq.functional.isoscore import isoscore_of_variances
from spectral_fairseq.functional.random_spectrum import random_mean_share
from spectral_fairseq.functional.ranks import effective_rank, stable_rank

# The cosine of random rows is zero only up to chance and rounding, so no more of it is shown.
COSINE_PLACES = 4


@dataclass(frozen=True)
class Measure:
    """One number of a report.

    Attributes:
        key: in ``measures`` of the JSON.
        title: for readers.
        meaning: definition, convention and range.
        compute: the value for one table, None where it does not apply; None for a measure of
            predictions or translations, which :mod:`commands` adds under this key.
        random: the value to be expected of a random table of the same shape and row length
            (:mod:`spectral_fairseq.functional.random_spectrum`); None where it is unknown.
        better: ``high`` or ``low`` values are nearer to isotropy; empty for neither.
        unit: empty for a pure number.
        headline: whether the report opens with it.
        digits: significant digits shown.
        decimals: places behind the point beyond which it is noise about zero; None if it is never.
    """

    key: str
    title: str
    meaning: str
    compute: Optional[Callable[[TableFacts], Optional[float]]]
    random: Union[float, Callable[[TableFacts], Optional[float]], None] = None
    better: str = ""
    unit: str = ""
    headline: bool = False
    digits: int = 4
    decimals: Optional[int] = None

    def shown(self, value: Optional[float]) -> str:
        """A value for readers; a dash where there is none."""
        return shown(value, self.digits, self.decimals)


def _with_counts(
    facts: TableFacts, statistic: Callable[[Tensor, Tensor], float]
) -> Optional[float]:
    return None if facts.log_counts is None else statistic(facts.log_counts, facts.norms)


def _stored_sigma_error(facts: TableFacts) -> Optional[float]:
    stored = facts.table.stored_sigma
    return None if stored is None else float((stored - facts.sigma).norm() / facts.sigma.norm())


def _prior_error(facts: TableFacts) -> Optional[float]:
    prior = facts.prior_sigma
    return None if prior is None else float((facts.sigma - prior).norm() / prior.norm())


def _of_group(group: str) -> Callable[[TableFacts], Optional[float]]:
    return lambda facts: facts.group_cosines.get(group)


def _random_i1(sigma: Tensor) -> float:
    """I1 of a random table: log Z(a_k) - log N is half the variance of the rows along a_k."""
    variance = sigma.square() / float(sigma.square().sum())
    return math.exp(float(variance[-1] - variance[0]) / 2)


GROUPS: Dict[str, List[Measure]] = {
    "Isotropy": [
        Measure(
            "i1",
            "I1",
            "min Z(a) / max Z(a), where Z(a) = sum_i exp(<w_i, a>) and a runs over both "
            "signs of every eigenvector of W'W, at W's own scale; 1 is isotropic",
            lambda t: t.isotropy.means["i1"],
            better="high",
        ),
        Measure(
            "i2",
            "I2",
            "standard deviation of Z(a) / mean of Z(a), over the same directions; 0 is isotropic",
            lambda t: t.isotropy.means["i2"],
            better="low",
        ),
        Measure(
            "isoscore",
            "IsoScore",
            "uniformity of the eigenvalues of the covariance (Rudman et al. 2022), mean "
            "subtracted; 1 is isotropic, 0 a line",
            lambda t: isoscore_of_variances(t.centred_sigma.square()) if t.dim > 1 else None,
            random=lambda t: isoscore_of_variances(t.random_sigma.square()) if t.dim > 1 else 0.0,
            better="high",
        ),
        Measure(
            "i1_centred",
            "I1, centred",
            "I1 of W minus its mean row, divided by the root mean square of its row norms, over "
            "the eigenvectors of that matrix, which makes tables of different scale comparable",
            lambda t: t.isotropy.means.get("i1_centred"),
            random=lambda t: _random_i1(t.random_sigma),
            better="high",
        ),
        Measure(
            "i2_centred",
            "I2, centred",
            "I2 of the same matrix",
            lambda t: t.isotropy.means.get("i2_centred"),
            better="low",
        ),
    ],
    "Cosines": [
        Measure(
            "mean_cosine",
            "mean cosine",
            "mean over all pairs of different words, exact; 0 if the words share no "
            "direction, 1 if they all point the same way",
            lambda t: t.mean_cosine,
            random=0.0,
            better="low",
            headline=True,
            decimals=COSINE_PLACES,
        ),
        Measure(
            "mean_cosine_centred",
            "mean cosine, centred",
            "the same after the mean of all rows is subtracted, which changes no probability if W "
            "is an output table",
            lambda t: t.centred_mean_cosine,
            random=0.0,
            better="low",
            decimals=COSINE_PLACES,
        ),
        Measure(
            "positive_cosines",
            "share of cosines that are not negative",
            "over the pairs of the sampled words; nearly 1 in a degenerate table (Gao et al. 2019)",
            lambda t: t.cosines.positive,
            random=0.5,
            better="low",
        ),
        Measure(
            "mean_share",
            "norm of the mean vector",
            "norm of the mean of all rows, divided by the root mean square of the row norms; 0 to "
            "1. A vector added to all rows of an output table changes no probability",
            lambda t: float(t.mean.norm()) / t.rms_norm,
            random=lambda t: random_mean_share(t.count),
            better="low",
            headline=True,
        ),
    ],
    "Spectrum": [
        Measure(
            "sigma_max",
            "sigma_1",
            "largest singular value of W",
            lambda t: float(t.sigma[0]),
            random=lambda t: t.edge,
        ),
        Measure(
            "sigma_min",
            "sigma_d",
            "smallest singular value of W; 0 if it cannot be told from roundoff",
            lambda t: float(t.sigma[-1]),
            random=lambda t: float(t.random_sigma[-1]),
        ),
        Measure(
            "effective_rank",
            "effective rank",
            "exp of the entropy of sigma_k / sum sigma (Roy and Vetterli 2007), between 1 and d",
            lambda t: effective_rank(t.sigma),
            random=lambda t: effective_rank(t.random_sigma),
            better="high",
        ),
        Measure(
            "sigma_over_edge_centred",
            "sigma_1 over the random edge, centred",
            "largest singular value of W minus its mean row, divided by the Marchenko-Pastur edge, "
            "that of a random table of this shape and row length",
            lambda t: float(t.centred_sigma[0]) / t.centred_edge if t.centred_edge > 0 else None,
            random=1.0,
            better="low",
            headline=True,
        ),
        Measure(
            "effective_rank_centred",
            "effective rank, centred",
            "effective rank (Roy and Vetterli 2007) of W minus its mean row: over how many of the "
            "d directions its singular values are spread",
            lambda t: effective_rank(t.centred_sigma),
            random=lambda t: effective_rank(t.random_sigma),
            better="high",
            headline=True,
        ),
        Measure(
            "stable_rank_centred",
            "stable rank, centred",
            "stable rank of W minus its mean row",
            lambda t: stable_rank(t.centred_sigma),
            random=lambda t: stable_rank(t.random_sigma),
            better="high",
        ),
    ],
    "Row norms": [
        Measure(
            "norm_mean",
            "row norm, mean",
            "mean of ||w_i||",
            lambda t: float(t.norms.mean()),
        ),
        Measure(
            "norm_count_pearson",
            "norm and log count, Pearson",
            "Pearson correlation of ||w_i|| with the smoothed log count of word i in the "
            "dictionary",
            lambda t: _with_counts(t, pearson),
            decimals=COSINE_PLACES,
        ),
        Measure(
            "norm_count_slope",
            "norm over log count, slope",
            "slope of the least-squares line of ||w_i|| over the smoothed log count",
            lambda t: _with_counts(t, slope),
        ),
        Measure(
            "untrained_rows",
            "rows that look never trained",
            "number of rows that are zero, equal to another row bit for bit, or whose log norm "
            "lies 5 robust standard deviations below the median",
            lambda t: float(len(t.untrained)),
            random=0.0,
            digits=6,
        ),
    ],
    "By frequency": [
        Measure(
            f"mean_cosine_{group}",
            f"mean cosine, {group} words",
            f"mean over all pairs of the {group} third of the words",
            _of_group(group),
            random=0.0,
            better="low",
            decimals=COSINE_PLACES,
        )
        for group in FREQUENCIES
    ],
    "Factors of an SVD table": [
        Measure(
            "u_frobenius",
            "||U'U - I||_F",
            "distance of the stored U from orthonormal columns, Frobenius norm",
            lambda t: t.table.orthogonality.get("u_frobenius"),
            better="low",
        ),
        Measure(
            "v_frobenius",
            "||V'V - I||_F",
            "distance of the stored V from orthonormal columns, Frobenius norm",
            lambda t: t.table.orthogonality.get("v_frobenius"),
            better="low",
        ),
        Measure(
            "stored_sigma_error",
            "stored sigma, relative error",
            "||learned sigma - true singular values|| / ||true||; 0 while U and V are orthonormal",
            _stored_sigma_error,
            better="low",
        ),
        Measure(
            "prior_error",
            "distance from the prior",
            "||true singular values - prior of the training|| / ||prior||",
            _prior_error,
            better="low",
        ),
    ],
    "Predictions on data": [
        Measure(
            "log_probability_rank",
            "rank of log P",
            "number of singular values of the contexts x words log-probability matrix "
            "above the expected roundoff, 1/2 sqrt(m + n + 1) sigma_1 eps",
            None,
            digits=6,
        ),
        Measure(
            "expected_pairwise_kl",
            "expected pairwise KL",
            "mean KL(P(.|c) || P(.|c')) over all pairs of different contexts",
            None,
            unit="nats",
        ),
        Measure(
            "hidden_mean_cosine",
            "hidden states, mean cosine",
            "over all pairs of inputs of the output layer",
            None,
            random=0.0,
            better="low",
            decimals=COSINE_PLACES,
        ),
    ],
    "Sentence-level BLEU of the n best": [
        Measure(
            f"bleu_{order}_{side}",
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

    Raises:
        DataError: the table cannot be measured.
    """
    values = {measure.key: measure.compute(facts) for measure in ALL if measure.compute is not None}
    # A correlation with a constant is not a number.
    return {k: v if v is None or math.isfinite(v) else None for k, v in values.items()}


def random_values(facts: TableFacts) -> Dict[str, float]:
    """What a random table of the same shape and row length would measure: key -> value."""
    known = {measure.key: measure.random for measure in ALL if measure.random is not None}
    values = {
        key: value if isinstance(value, float) else value(facts) for key, value in known.items()
    }
    return {key: value for key, value in values.items() if value is not None}


def shown(value: Optional[float], digits: int = 4, decimals: Optional[int] = None) -> str:
    """A number of ``digits`` significant digits and at most ``decimals`` places behind the point.

    A dash stands where there is none. No number is -0.
    """
    if value is None:
        return "–"
    return f"{(value if decimals is None else round(value, decimals)) + 0.0:.{digits}g}"


def cosine_shown(value: Optional[float], digits: int = 3) -> str:
    """A mean cosine for readers, without an exponent."""
    return shown(value, digits, COSINE_PLACES)


def groups_in_use(measured: Sequence[Mapping[str, Optional[float]]]) -> Dict[str, List[Measure]]:
    """The measures that at least one checkpoint has a value of, in groups."""
    kept = {
        group: [m for m in measures if any(values.get(m.key) is not None for values in measured)]
        for group, measures in GROUPS.items()
    }
    return {group: measures for group, measures in kept.items() if measures}
