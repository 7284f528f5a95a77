"""Every measure of a report: its key in the JSON, its name for readers, and what it means.

The text, LaTeX and HTML tables and the JSON schema are all made from this list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional


@dataclass(frozen=True)
class Measure:
    """One number of a report.

    Attributes:
        key: in ``measures`` of the JSON.
        title: for readers.
        latex: the same for LaTeX.
        meaning: definition, convention, and range.
        digits: significant digits shown.
    """

    key: str
    title: str
    latex: str
    meaning: str
    digits: int = 4


GROUPS: Dict[str, List[Measure]] = {
    "Isotropy": [
        Measure("i1", "I1", "$I_1$",
                "min Z(a) / max Z(a), Z(a) = sum_i exp(<w_i, a>), over both signs of every "
                "eigenvector of W'W, W at its own scale; 1 is isotropic"),
        Measure("i2", "I2", "$I_2$",
                "standard deviation of Z(a) / mean Z(a), same directions; 0 is isotropic"),
        Measure("i1_one_sign", "I1, one sign", "$I_1$, one sign",
                "I1 over one direction for each eigenvector, the sign along the rows' mean"),
        Measure("i2_one_sign", "I2, one sign", "$I_2$, one sign",
                "I2 over one direction for each eigenvector, the sign along the rows' mean"),
        Measure("i1_unit_scale", "I1, unit scale", "$I_1$, unit scale",
                "I1, both signs, of W divided by the root mean square of its row norms: tables of "
                "different size become comparable"),
        Measure("i2_unit_scale", "I2, unit scale", "$I_2$, unit scale",
                "I2, both signs, of W divided by the root mean square of its row norms"),
        Measure("isoscore", "IsoScore", "IsoScore",
                "uniformity of the covariance's eigenvalues (Rudman et al. 2022), mean subtracted; "
                "1 is isotropic, 0 a line"),
    ],
    "Cosines": [
        Measure("mean_cosine", "mean cosine", "mean cosine",
                "over all pairs of different words, exact; 0 for isotropic, 1 for one direction"),
        Measure("cosine_std", "cosine, standard deviation", "cosine, std.",
                "over the pairs of the sampled words"),
        Measure("cosine_p05", "cosine, 5th percentile", "cosine, 5\\,\\%",
                "over the pairs of the sampled words"),
        Measure("cosine_p50", "cosine, median", "cosine, median",
                "over the pairs of the sampled words"),
        Measure("cosine_p95", "cosine, 95th percentile", "cosine, 95\\,\\%",
                "over the pairs of the sampled words"),
    ],
    "Spectrum": [
        Measure("sigma_max", "sigma_1", "$\\sigma_1$", "largest true singular value of W"),
        Measure("sigma_2", "sigma_2", "$\\sigma_2$", "second singular value"),
        Measure("sigma_median", "sigma, median", "$\\sigma$, median",
                "median singular value (the lower one of two)"),
        Measure("sigma_min", "sigma_d", "$\\sigma_d$",
                "smallest singular value; 0 if it cannot be told from roundoff"),
        Measure("frobenius_norm", "Frobenius norm", "$\\|W\\|_F$", "sqrt(sum_k sigma_k^2)"),
        Measure("share_of_first", "share of sigma_1", "$\\sigma_1/\\sum\\sigma_k$",
                "sigma_1 / sum_k sigma_k; 1/d for a flat spectrum"),
        Measure("effective_rank", "effective rank", "effective rank",
                "exp of the entropy of sigma_k / sum sigma (Roy and Vetterli 2007); 1 to d"),
        Measure("stable_rank", "stable rank", "stable rank",
                "sum_k sigma_k^2 / sigma_1^2; 1 to d"),
    ],
    "Decay fitted to the spectrum": [
        Measure("exponential_c1", "exponential, c1", "exp., $c_1$",
                "c1 of c1 exp(-c2 k^gamma), least squares on sigma"),
        Measure("exponential_c2", "exponential, c2", "exp., $c_2$", "c2 of that fit"),
        Measure("exponential_gamma", "exponential, gamma >= 0.1", "exp., $\\gamma$",
                "gamma of that fit, 0.1 at least: a spectrum that ends there decays polynomially"),
        Measure("exponential_error", "exponential, relative error", "exp., rel.\\ error",
                "||sigma - fit|| / ||sigma||"),
        Measure("polynomial_c1", "polynomial, c1", "pol., $c_1$",
                "c1 of c1 k^-gamma, least squares on sigma"),
        Measure("polynomial_gamma", "polynomial, gamma", "pol., $\\gamma$", "gamma of that fit"),
        Measure("polynomial_error", "polynomial, relative error", "pol., rel.\\ error",
                "||sigma - fit|| / ||sigma||"),
    ],
    "Row norms": [
        Measure("norm_mean", "row norm, mean", "$\\|w\\|$, mean", "mean of ||w_i||"),
        Measure("norm_std", "row norm, standard deviation", "$\\|w\\|$, std.",
                "standard deviation of ||w_i||"),
        Measure("norm_min", "row norm, least", "$\\|w\\|$, min", "least ||w_i||"),
        Measure("norm_max", "row norm, greatest", "$\\|w\\|$, max", "greatest ||w_i||"),
        Measure("norm_count_pearson", "norm and log count, Pearson", "norm/log count, $r$",
                "Pearson correlation of ||w_i|| and the smoothed log count of word i in the "
                "dictionary"),
        Measure("norm_count_spearman", "norm and log count, Spearman", "norm/log count, $\\rho$",
                "Spearman correlation of the two"),
        Measure("norm_count_slope", "norm over log count, slope", "norm/log count, slope",
                "slope of the least-squares line of ||w_i|| over the smoothed log count"),
    ],
    "Factors of an SVD table": [
        Measure("u_frobenius", "||U'U - I||_F", "$\\|U'U-I\\|_F$",
                "distance of the stored U from orthonormal columns, Frobenius norm"),
        Measure("u_spectral", "||U'U - I||_2", "$\\|U'U-I\\|_2$", "the same, spectral norm"),
        Measure("v_frobenius", "||V'V - I||_F", "$\\|V'V-I\\|_F$", "of V, Frobenius norm"),
        Measure("v_spectral", "||V'V - I||_2", "$\\|V'V-I\\|_2$", "of V, spectral norm"),
        Measure("stored_sigma_error", "stored sigma, relative error", "stored $\\sigma$, error",
                "||sigma as learned - true singular values|| / ||true||: 0 while U and V are "
                "orthonormal"),
        Measure("prior_error", "distance from the prior", "prior, rel.\\ error",
                "||true singular values - prior of the training|| / ||prior||"),
    ],
    "Predictions on data": [
        Measure("log_probability_rank", "rank of log P", "rank of $\\log P$",
                "singular values of the contexts x words log-probability matrix above the expected "
                "roundoff, 1/2 sqrt(m + n + 1) sigma_1 eps", 6),
        Measure("expected_pairwise_kl", "expected pairwise KL", "expected pairwise KL",
                "mean KL(P(.|c) || P(.|c')) over all pairs of different contexts, nats"),
    ],
    "Sentence-level BLEU of the n best": [
        Measure(f"bleu_{order}_{side}", f"BLEU-{order} {side}", f"BLEU-{order} {side}",
                {"precision": "mean over hypotheses of the best smoothed sentence BLEU against any "
                 "reference, then over sentences; 0 to 1",
                 "recall": "mean over references of the best smoothed sentence BLEU of any "
                 "hypothesis, then over sentences; 0 to 1"}[side])
        for order in (1, 2, 3, 4) for side in ("precision", "recall")
    ],
}  # fmt: skip

ALL: List[Measure] = [measure for group in GROUPS.values() for measure in group]


def shown(value: Optional[float], digits: int = 4) -> str:
    """A number for readers; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}g}"


def groups_in_use(measured: List[Mapping[str, Optional[float]]]) -> Dict[str, List[Measure]]:
    """The measures that at least one checkpoint has a value of, in groups."""
    kept = {
        group: [m for m in measures if any(found.get(m.key) is not None for found in measured)]
        for group, measures in GROUPS.items()
    }
    return {group: measures for group, measures in kept.items() if measures}
