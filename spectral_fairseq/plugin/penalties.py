"""The penalties that every criterion of this package takes: one declaration each.

``docs/adding_a_penalty.md`` shows how to add one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.embeddings import SVDEmbedding, WeightNormEmbedding
from spectral_fairseq.errors import ConfigurationError, check_range, misspelt
from spectral_fairseq.functional.row_norms import row_norms
from spectral_fairseq.functional.row_penalties import (
    cosine_penalty,
    log_count_target,
    weight_norm_penalty,
)
from spectral_fairseq.functional.spectra import singular_values
from spectral_fairseq.functional.spectrum_penalties import (
    check_rank,
    d_optimal_penalty,
    normalized_d_optimal_penalty,
    orthogonality_penalty,
    spectral_normalization_penalty,
    spectrum_penalty,
)
from spectral_fairseq.options import Option, weight_option
from spectral_fairseq.plugin import find
from spectral_fairseq.plugin.objective import (
    ACTIVATION_NAMES,
    MEASURE_NAMES,
    PENALTY_INTERVAL,
    PRIOR_FLAGS,
    Inputs,
    Penalty,
    PerDevice,
    Words,
)

# What penalties can be computed from, each a function of a model.
#
# Tables are float32, and padding and ``madeupword`` rows are marked as excluded. A need raises
# :class:`ConfigurationError` if the model lacks it; ```weight``` in the message stands for the flag
# of the penalty that asked.


def output_table(inputs: Inputs) -> Tuple[Tensor, Tensor]:
    """The output table W, of any kind, shape (N, d), and the rows that are not counted, shape (m,).

    A factored table is multiplied out.
    """
    weight = find.output_matrix(inputs.decoder, inputs.words.rows).float()
    return weight, inputs.words.excluded_on(weight.device)


def output_row_norms(inputs: Inputs) -> Tuple[Tensor, Tensor]:
    """||W_j||, shape (N,), which a weight-norm table stores, and the rows that are not counted."""
    table = find.table_module(inputs.decoder)
    if isinstance(table, WeightNormEmbedding):
        return table.norms(), table.excluded_rows
    weight, excluded = inputs.get(output_table)
    return row_norms(weight), excluded


def output_singular_values(inputs: Inputs) -> Tensor:
    """The singular values of the output table, shape (d,); the learned ones of an SVD table."""
    table = find.table_module(inputs.decoder)
    if isinstance(table, SVDEmbedding):
        return table.singular_values()
    weight, excluded = inputs.get(output_table)
    check_rank(len(weight) - len(excluded), weight.size(1))
    return singular_values(weight, excluded)


def svd_tables(inputs: Inputs) -> Tuple[SVDEmbedding, ...]:
    """All SVD tables of the model; at least one."""
    if not inputs.parts.svd_tables:
        raise ConfigurationError(
            "a model with an SVD table for `weight`",
            f"none in {inputs.parts.model_name}",
            "Use --embedding-type svd with an arch of this package, or drop `weight`.",
        )
    return inputs.parts.svd_tables


# The penalties. Their papers and formulas are in functional/row_penalties.py and
# functional/spectrum_penalties.py.

# The mean cosine between different words (MLE-CosReg).
COSINE = Penalty(
    name="cosine",
    weight=weight_option(
        "cosreg_weight", "gamma: weight of the mean cosine between different words"
    ),
    needs=output_table,
    value=lambda table, _: cosine_penalty(*table),
)


# The distance of singular values from a prior.
#
# An SVD table has its singular values, and its prior, as parts; of any other output table they are
# those of W itself, and the gradient is W V diag(2 (sigma - prior) / sigma) V'.


def spectra(inputs: Inputs) -> List[Tuple[Tensor, Tensor]]:
    """The learned sigma of each SVD table, or the true one of the output table without any.

    Each has its prior beside it; both have the shape (d,).
    """
    if inputs.parts.svd_tables:
        return [(table.singular_values(), table.prior()) for table in inputs.parts.svd_tables]
    sigma = inputs.get(output_singular_values)
    return [(sigma, inputs.parts.prior(*inputs.get(output_table)).to(sigma))]


SPECTRUM = Penalty(
    name="spectrum",
    weight=Option(
        "spectrum_weight",
        0.0,
        "lambda_e or lambda_p: weight of sum_k (sigma_k - prior_k)^2, of an SVD table's sigma or "
        "of the true singular values of any other output table",
        at_least=0,
        type=Optional[float],
    ),
    settings=PRIOR_FLAGS,
    needs=spectra,
    value=lambda spectra_of, _: torch.stack(
        [spectrum_penalty(*spectrum) for spectrum in spectra_of]
    ).sum(),
    # Of an SVD table it takes d numbers.
    lazy=lambda inputs: not inputs.parts.svd_tables,
)


def four_weights(text: str) -> Tuple[float, float, float, float]:
    """l1, l2, l3 and l4 of a text such as ``0.01,0.01,0,0``.

    Raises:
        ConfigurationError: ``text`` is not four numbers, or one of them cannot be a weight.
    """
    try:
        l1, l2, l3, l4 = (float(part) for part in str(text).split(","))
    except ValueError:
        wanted = "`value` to be four numbers separated by commas, such as 0.01,0.01,0,0"
        raise misspelt(wanted, text) from None
    for weight in (l1, l2, l3, l4):
        check_range("`value`", weight, at_least=0)
    return l1, l2, l3, l4


def _orthogonality_value(tables: Tuple[SVDEmbedding, ...], options: Any) -> Tensor:
    values = []
    for table in tables:
        u_gram, v_gram = table.grams()
        values.append(orthogonality_penalty(u_gram, v_gram, options.orthogonality_weights))
    return torch.stack(values).sum()


ORTHOGONALITY = Penalty(
    name="orthogonality",
    weight=Option(
        "orthogonality_weights",
        "0,0,0,0",
        "l1,l2,l3,l4: weights of ||U'U-I||_F^2, ||V'V-I||_F^2, ||U'U-I||_2^2 and ||V'V-I||_2^2 of "
        "an SVD table",
        parse=four_weights,
        type=Optional[str],
    ),
    needs=svd_tables,
    value=_orthogonality_value,
)


# Spectral normalisation as a penalty, and the D-optimal regulariser: comparators of the spectrum's.
SPECTRAL_NORMALIZATION = Penalty(
    name="spectral_normalization",
    weight=weight_option(
        "spectral_normalization_weight", "weight of sum_k (1 - sigma_k/sigma_1)^2"
    ),
    needs=output_singular_values,
    value=lambda sigma, _: spectral_normalization_penalty(sigma),
)


D_OPTIMAL = Penalty(
    name="d_optimal",
    weight=weight_option("d_optimal_weight", "weight of -sum_k log sigma_k, which has no minimum"),
    needs=output_singular_values,
    value=lambda sigma, _: d_optimal_penalty(sigma),
)

NORMALIZED_D_OPTIMAL = Penalty(
    name="normalized_d_optimal",
    weight=weight_option("normalized_d_optimal_weight", "weight of -sum_k log(sigma_k/sigma_1)"),
    needs=output_singular_values,
    value=lambda sigma, _: normalized_d_optimal_penalty(sigma),
)


def _with_targets(options: Any, words: Words) -> Any:
    """Options whose target is a constant: a scalar, or one number for each word, shape (N,)."""
    target = torch.tensor(options.weight_norm_target)
    if options.weight_norm_target_by_count:
        target = log_count_target(words.log_counts, options.weight_norm_target, words.excluded)
    return SimpleNamespace(**{**vars(options), "weight_norm_target": PerDevice(target)})


def _weight_norm_value(rows: Tuple[Tensor, Tensor], options: Any) -> Tensor:
    norms, excluded = rows
    return weight_norm_penalty(norms, options.weight_norm_target.on(norms.device), excluded)


WEIGHT_NORM = Penalty(
    name="weight_norm",
    weight=weight_option("weight_norm_weight", "rho: weight of sqrt(sum_j (||W_j|| - nu)^2)"),
    settings=(
        Option(
            "weight_norm_target",
            2.0,
            "nu: the norm to which word vectors are pulled",
            at_least=0,
            needs=("weight_norm_weight",),
        ),
        Option(
            "weight_norm_target_by_count",
            False,
            "give each word a target of its own, proportional to its smoothed log count, with "
            "mean nu",
            needs=("weight_norm_weight",),
        ),
    ),
    for_words=_with_targets,
    needs=output_row_norms,
    value=_weight_norm_value,
)


# In the order of the training logs and of docs/flags.md.
PENALTIES = (
    COSINE,
    SPECTRUM,
    ORTHOGONALITY,
    WEIGHT_NORM,
    SPECTRAL_NORMALIZATION,
    NORMALIZED_D_OPTIMAL,
    D_OPTIMAL,
)
FLAGS = (*(flag for penalty in PENALTIES for flag in penalty.flags), PENALTY_INTERVAL)
NAMES = (*(penalty.name for penalty in PENALTIES), *ACTIVATION_NAMES, *MEASURE_NAMES)
