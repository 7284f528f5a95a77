"""The penalties on tables: one declaration each, for fairseq and for any training with torch.

``docs/adding_a_penalty.md`` shows how to add one. ``plugin/objective.py`` makes flags of the list,
``training/penalties.py`` the arguments of ``TablePenalty``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from spectral_fairseq.embeddings import SVDEmbedding, Table, WeightNormEmbedding
from spectral_fairseq.errors import check_range, misspelt
from spectral_fairseq.functional.cosine_penalty import cosine_penalty
from spectral_fairseq.functional.d_optimal_penalty import (
    d_optimal_penalty,
    normalized_d_optimal_penalty,
)
from spectral_fairseq.functional.orthogonality_penalty import orthogonality_penalty
from spectral_fairseq.functional.row_norms import row_norms
from spectral_fairseq.functional.spectra import singular_values
from spectral_fairseq.functional.spectral_normalization_penalty import (
    spectral_normalization_penalty,
)
from spectral_fairseq.functional.spectrum_penalty import check_rank, spectrum_penalty
from spectral_fairseq.functional.weight_norm_penalty import log_count_target, weight_norm_penalty
from spectral_fairseq.methods import prior
from spectral_fairseq.options import Option, weight_option


class OutputTable(ABC):
    """The output table of a model at one update; what several penalties need is computed once.

    Attributes:
        module: the table, if it is one of this package.
        svd_tables: all SVD tables of the model, each once however often it is shared.
    """

    module: Optional[Table]
    svd_tables: Tuple[SVDEmbedding, ...]

    def __init__(self) -> None:
        self._found: Dict[Need, Any] = {}

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the table is."""

    @property
    @abstractmethod
    def excluded(self) -> Tensor:
        """The rows that are not counted, shape (m,)."""

    @abstractmethod
    def weight(self) -> Tensor:
        """W of any kind, float32 or wider, shape (N, d).

        A factored table is multiplied out.

        Raises:
            ConfigurationError: there is none; in the message ```weight``` stands for the penalty.
        """

    @abstractmethod
    def prior(self) -> Tensor:
        """The singular values to which those of a table without factors are drawn, shape (d,).

        Raises:
            ConfigurationError: none is known, or it leaves directions unused.
        """

    @abstractmethod
    def refuse_without_svd_table(self) -> None:
        """Refuse a model that has no SVD table.

        Raises:
            ConfigurationError: always; in the message ```weight``` stands for the penalty.
        """

    def get(self, need: Need) -> Any:
        """What ``need`` returns for this table."""
        if need not in self._found:
            self._found[need] = need(self)
        return self._found[need]


Need = Callable[[OutputTable], Any]


def weight_and_excluded(table: OutputTable) -> Tuple[Tensor, Tensor]:
    """The output table W, of any kind, shape (N, d), and the rows that are not counted, (m,)."""
    return table.weight(), table.excluded


def output_row_norms(table: OutputTable) -> Tuple[Tensor, Tensor]:
    """||W_j||, shape (N,), which a weight-norm table stores, and the rows that are not counted."""
    if isinstance(table.module, WeightNormEmbedding):
        return table.module.norms(), table.excluded
    weight, excluded = table.get(weight_and_excluded)
    return row_norms(weight), excluded


def output_singular_values(table: OutputTable) -> Tensor:
    """The singular values of the output table, shape (d,); the learned ones of an SVD table."""
    if isinstance(table.module, SVDEmbedding):
        return table.module.singular_values()
    weight, excluded = table.get(weight_and_excluded)
    check_rank(len(weight) - len(excluded), weight.size(1))
    return singular_values(weight, excluded)


def required_svd_tables(table: OutputTable) -> Tuple[SVDEmbedding, ...]:
    """All SVD tables of the model; at least one."""
    if not table.svd_tables:
        table.refuse_without_svd_table()
    return table.svd_tables


def spectra(table: OutputTable) -> List[Tuple[Tensor, Tensor]]:
    """The learned sigma of each SVD table, or the true one of the output table without any.

    Each has its prior beside it; both have the shape (d,). The gradient of a table without factors
    is W V diag(2 (sigma - prior) / sigma) V'.
    """
    if table.svd_tables:
        return [(one.singular_values(), one.prior()) for one in table.svd_tables]
    sigma = table.get(output_singular_values)
    return [(sigma, table.prior().to(sigma))]


class PerDevice:
    """A constant tensor, which is copied to a device only once: each copy keeps a GPU waiting."""

    def __init__(self, constant: Tensor) -> None:
        self._copies: Dict[torch.device, Tensor] = {constant.device: constant}

    def on(self, device: torch.device) -> Tensor:
        """The constant on ``device``."""
        if device not in self._copies:
            with torch.inference_mode(False):  # a penalty may be evaluated before it is trained
                self._copies[device] = next(iter(self._copies.values())).to(device)
        return self._copies[device]


@dataclass(frozen=True)
class Penalty:
    """A term ``weight * R`` of the objective, R a function of the model's parameters.

    Args:
        name: key of R in the training logs, and argument of ``TablePenalty``.
        weight: flag of the weight; a weight of 0 costs nothing. A flag that parses to several
            numbers weighs the parts of R, which then enters the objective as it is.
        needs: what R is computed from, one of the functions above; it refuses tables that lack it.
        value: R, a scalar, from what ``needs`` found and the options: the parsed values of all
            flags of this penalty, by name. Called in float32, outside autocast.
        settings: further flags; those with an ``argument`` are arguments of ``TablePenalty`` too.
        for_words: completes the options for a dictionary, of which it is given the ``log_counts``
            and the ``excluded`` rows; called once for each dictionary.
        lazy: whether R is computed every k-th update only; see Note [Lazy penalties] in
            ``plugin/objective.py``.
        unit: the parsed value of the weight's flag that is a weight of 1 in ``TablePenalty``.
    """

    name: str
    weight: Option
    needs: Need
    value: Callable[[Any, Any], Tensor]
    settings: Tuple[Option, ...] = ()
    for_words: Callable[[Any, Any], Any] = lambda options, _: options
    lazy: Callable[[OutputTable], bool] = lambda _: True
    unit: Any = 1.0

    @property
    def flags(self) -> Tuple[Option, ...]:
        """All flags of this penalty."""
        return (self.weight, *self.settings)

    def factor(self, options: Any) -> float:
        """The factor of R in the objective; 0 if the penalty is off."""
        weight = getattr(options, self.weight.name)
        return float(any(weight)) if isinstance(weight, tuple) else weight

    def of(self, table: OutputTable, options: Any) -> Tensor:
        """R of a table."""
        with torch.autocast(table.device.type, enabled=False):
            return self.value(table.get(self.needs), options)


# The mean cosine between different words (MLE-CosReg).
COSINE = Penalty(
    name="cosine",
    weight=weight_option(
        "cosreg_weight", "gamma: weight of the mean cosine between different words"
    ),
    needs=weight_and_excluded,
    value=lambda table, _: cosine_penalty(*table),
)


# The distance of singular values from a prior, which an SVD table knows. On a command line the
# criterions share these flags with the archs of this package.
AN_SVD_TABLE = "an SVD table"
PRIOR = tuple(
    replace(entry, needs=("spectrum_weight", "spectrum_decay", AN_SVD_TABLE))
    for entry in prior.OPTIONS
)
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
    settings=PRIOR,
    needs=spectra,
    value=lambda spectra_of, _: torch.stack(
        [spectrum_penalty(*spectrum) for spectrum in spectra_of]
    ).sum(),
    # Of an SVD table it takes d numbers.
    lazy=lambda table: not table.svd_tables,
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
    weights = options.orthogonality_weights
    return torch.stack([orthogonality_penalty(*one.grams(), weights) for one in tables]).sum()


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
    needs=required_svd_tables,
    value=_orthogonality_value,
    unit=(1.0, 1.0, 0.0, 0.0),
)


def _with_targets(options: Any, words: Any) -> Any:
    """Options whose target is a constant: a scalar, or one number for each word, shape (N,)."""
    target = torch.tensor(options.weight_norm_target, dtype=torch.float32, device="cpu")
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
            argument="norm_target",
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
