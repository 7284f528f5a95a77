"""The papers' penalties: their flags, the checks on them, and their values for a model."""

# No "from __future__ import annotations" here: fairseq and omegaconf read the field types.
import math
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple
from weakref import WeakKeyDictionary

import torch
from fairseq.dataclass import FairseqDataclass
from torch import Tensor, nn

from spectral_fairseq.embeddings import SVDEmbedding, WeightNormEmbedding
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.counts import smoothed_log_counts
from spectral_fairseq.functional.linalg.row_norms import row_norms
from spectral_fairseq.functional.linalg.singular_values import singular_values
from spectral_fairseq.functional.penalties.cosine import cosine_penalty
from spectral_fairseq.functional.penalties.d_optimal import d_optimal_penalty
from spectral_fairseq.functional.penalties.orthogonality import orthogonality_penalty
from spectral_fairseq.functional.penalties.spectral_normalization import (
    spectral_normalization_penalty,
)
from spectral_fairseq.functional.penalties.spectrum import spectrum_penalty
from spectral_fairseq.functional.penalties.weight_norm import log_count_target, weight_norm_penalty
from spectral_fairseq.plugin.models.output_table import (
    decoder_of,
    factored_table,
    output_table,
    svd_tables,
)
from spectral_fairseq.plugin.models.tables import uncounted_rows

# Note [Lazy penalties]
# ---------------------
# A penalty on a whole table costs the same whatever the batch: at N = 267,735 and d = 410 the N d^2
# products of U'U, forward and again backward, are about a quarter of the softmax of 1,024 tokens,
# and a gradient of N d numbers alone is 2 % of such a step. A table moves by far less than its own
# size in a few updates, so for large N these penalties are computed every k-th update with k times
# their weight: the gradient summed over k updates stays the same to first order. The spectrum
# penalty looks at d numbers and is always there. In between, the logs show what was computed last:
# for a key without a value the host would show "None".
LARGE_DICTIONARY = 65536
WORDS_PER_INTERVAL_STEP = 16384


@dataclass
class PenaltyFlags(FairseqDataclass):
    """A weight for each penalty; a weight of 0 costs nothing."""

    cosreg_weight: float = field(
        default=0.0,
        metadata={"help": "gamma: weight of the mean cosine between different words"},
    )
    spectrum_weight: float = field(
        default=0.0,
        metadata={
            "help": "lambda_e or lambda_p: weight of sum_k (sigma_k - prior_k)^2 of an SVD table"
        },
    )
    orthogonality_weights: str = field(
        default="0,0,0,0",
        metadata={
            "help": "l1,l2,l3,l4: weights of ||U'U-I||_F^2, ||V'V-I||_F^2, ||U'U-I||_2^2 and "
            "||V'V-I||_2^2 of an SVD table"
        },
    )
    penalty_interval: str = field(
        default="auto",
        metadata={
            "help": "compute the penalties on whole tables every k-th update, k times as strong; "
            "'auto' is 1 up to 65,535 words and grows with the dictionary"
        },
    )
    weight_norm_weight: float = field(
        default=0.0,
        metadata={"help": "rho: weight of sqrt(sum_j (||W_j|| - nu)^2)"},
    )
    weight_norm_target: float = field(
        default=2.0, metadata={"help": "nu: the norm that word vectors are drawn to"}
    )
    weight_norm_target_by_count: bool = field(
        default=False,
        metadata={
            "help": "give each word a target of its own, proportional to its smoothed log count, "
            "with mean nu"
        },
    )
    spectral_normalization_weight: float = field(
        default=0.0,
        metadata={"help": "weight of sum_k (1 - sigma_k/sigma_1)^2"},
    )
    d_optimal_weight: float = field(default=0.0, metadata={"help": "weight of -sum_k log sigma_k"})
    adversarial_epsilon: float = field(
        default=0.0,
        metadata={"help": "in training a target's logit loses epsilon ||w_y|| ||h||"},
    )


class Penalty(NamedTuple):
    """One term of the objective: weight times value, value a float32 scalar."""

    name: str
    weight: float
    value: Tensor


class Words(NamedTuple):
    """What penalties know of a target dictionary.

    Args:
        dictionary: the dictionary itself.
        rows: N, its size.
        excluded: rows that are not counted.
        target: nu, of all words or of each.
        interval: k of the lazy penalties.
    """

    dictionary: Any
    rows: int
    excluded: Tensor
    target: Tensor
    interval: int


ACTIVATION_PENALTIES = ("activation", "temporal_activation")
"""Names of the penalties that a model puts on its own activations."""


class Penalties:
    """The penalties that the flags ask for.

    Args:
        cfg: :class:`PenaltyFlags`.
        dictionary: target dictionary, for models whose decoder does not say its own; padding and
            made-up rows are not counted.

    Raises:
        ConfigurationError: a flag outside its range.
        DataError: targets by count from a dictionary without counts.
    """

    NAMES = (
        "cosine",
        "spectrum",
        "orthogonality",
        "weight_norm",
        "spectral_normalization",
        "d_optimal",
    )

    def __init__(self, cfg: Any, dictionary: Any) -> None:
        self.cosreg_weight = checked_weight("--cosreg-weight", cfg.cosreg_weight)
        self.spectrum_weight = checked_weight("--spectrum-weight", cfg.spectrum_weight)
        self.orthogonality_weights = parse_orthogonality_weights(cfg.orthogonality_weights)
        self.weight_norm_weight = checked_weight("--weight-norm-weight", cfg.weight_norm_weight)
        self.spectral_normalization_weight = checked_weight(
            "--spectral-normalization-weight", cfg.spectral_normalization_weight
        )
        self.d_optimal_weight = checked_weight("--d-optimal-weight", cfg.d_optimal_weight)
        self._interval = parse_interval(cfg.penalty_interval)
        self._norm = checked_weight("--weight-norm-target", cfg.weight_norm_target)
        self._norm_by_count = cfg.weight_norm_target_by_count
        self._dictionary = dictionary
        self._words: Dict[int, Words] = {}
        self.words(None)  # refuses a dictionary without counts
        self._last: WeakKeyDictionary[nn.Module, List[Penalty]] = WeakKeyDictionary()

    def __call__(self, model: nn.Module) -> List[Penalty]:
        """The penalties due at this update, in float32 outside autocast.

        Raises:
            ConfigurationError: the model has not the table that a penalty needs.
        """
        due = self._always(model)
        interval = self.words(model).interval
        if getattr(model, "num_updates", 0) % interval:
            return due
        lazy = self._on_tables(model)
        self._last[decoder_of(model)] = [p._replace(value=p.value.detach()) for p in lazy]
        return due + [p._replace(weight=p.weight * interval) for p in lazy]

    @torch.no_grad()
    def check(self, model: nn.Module) -> None:
        """Refuse a model without the tables that the penalties need, due or not.

        Raises:
            ConfigurationError: the model has not the table that a penalty needs.
        """
        self._always(model)
        self.last(model)

    @torch.no_grad()
    def last(self, model: nn.Module) -> List[Penalty]:
        """What :func:`__call__` computes every k-th update, as it last was; for logs.

        Computed now if it never was, as in the first updates after training resumed.

        Raises:
            ConfigurationError: the model has not the table that a penalty needs.
        """
        decoder = decoder_of(model)
        if decoder not in self._last:
            self._last[decoder] = self._on_tables(model)
        return self._last[decoder]

    def words(self, model: Optional[nn.Module]) -> "Words":
        """The words of the model's table.

        They are those of its decoder's dictionary: a task for several target languages has one for
        each, of which it shows the criterion the first.
        """
        dictionary = getattr(decoder_of(model), "dictionary", None) if model is not None else None
        if dictionary is None:
            dictionary = self._dictionary
        if id(dictionary) not in self._words:
            self._words[id(dictionary)] = self._words_in(dictionary)
        return self._words[id(dictionary)]

    def output_table(self, model: nn.Module) -> Tuple[Tensor, Tensor]:
        """The table in float32, shape (N, d), and the rows of it that are not counted."""
        words = self.words(model)
        weight = output_table(model, words.rows).float()
        return weight, words.excluded.to(weight.device)

    def _words_in(self, dictionary: Any) -> "Words":
        excluded, target = torch.tensor(uncounted_rows(dictionary)), torch.tensor(self._norm)
        if self._norm_by_count:
            counts = smoothed_log_counts(dictionary.count[: len(dictionary)])
            target = log_count_target(counts, self._norm, excluded)
        # See Note [Lazy penalties].
        interval = self._interval or interval_for(len(dictionary))
        return Words(dictionary, len(dictionary), excluded, target, interval)

    def _always(self, model: nn.Module) -> List[Penalty]:
        if not (self.spectrum_weight or any(self.orthogonality_weights)):
            return []
        tables = svd_tables(model)
        if not self.spectrum_weight:
            return []
        with torch.autocast(_device_of(model), enabled=False):
            value = _total(lambda t: spectrum_penalty(t.singular_values(), t.prior()), tables)
        return [Penalty("spectrum", self.spectrum_weight, value)]

    def _on_tables(self, model: nn.Module) -> List[Penalty]:
        """The penalties on whole tables, with their weights at every update."""
        found: List[Penalty] = []
        with torch.autocast(_device_of(model), enabled=False):
            if any(self.orthogonality_weights):
                value = _total(
                    lambda t: orthogonality_penalty(*t.grams(), self.orthogonality_weights),
                    svd_tables(model),
                )
                found.append(Penalty("orthogonality", 1.0, value))
            if self.cosreg_weight:
                value = cosine_penalty(*self.output_table(model))
                found.append(Penalty("cosine", self.cosreg_weight, value))
            if self.weight_norm_weight:
                value = self._of_norms(model)
                found.append(Penalty("weight_norm", self.weight_norm_weight, value))
            if self.spectral_normalization_weight or self.d_optimal_weight:
                found.extend(self._of_singular_values(model))
        return found

    def _of_norms(self, model: nn.Module) -> Tensor:
        table = factored_table(model)
        if isinstance(table, WeightNormEmbedding):  # knows its norms without building W
            norms, excluded = table.norms(), table.excluded_rows
        else:
            weight, excluded = self.output_table(model)
            norms = row_norms(weight)
        target = self.words(model).target.to(norms.device)
        return weight_norm_penalty(norms, target, excluded)

    def _of_singular_values(self, model: nn.Module) -> List[Penalty]:
        table = factored_table(model)
        if isinstance(table, SVDEmbedding):
            sigma = table.singular_values()
        else:
            sigma = singular_values(*self.output_table(model))
        due = []
        if self.spectral_normalization_weight:
            value = spectral_normalization_penalty(sigma)
            due.append(Penalty("spectral_normalization", self.spectral_normalization_weight, value))
        if self.d_optimal_weight:
            due.append(Penalty("d_optimal", self.d_optimal_weight, d_optimal_penalty(sigma)))
        return due


def activation_penalties(net_output: Any) -> List[Penalty]:
    """The penalties that a recurrent model puts on its own activations, with its own weights."""
    extra = net_output[1] if len(net_output) > 1 else None
    penalties = extra.get("activation_penalties") if isinstance(extra, dict) else None
    return [Penalty(name, weight, value) for name, (weight, value) in (penalties or {}).items()]


def _device_of(model: nn.Module) -> str:
    return next(model.parameters()).device.type


def _total(value: Callable[[SVDEmbedding], Tensor], tables: List[SVDEmbedding]) -> Tensor:
    return torch.stack([value(table) for table in tables]).sum()


def checked_weight(flag: str, value: float) -> float:
    """``value`` as a weight.

    Raises:
        ConfigurationError: negative, infinite or not a number.
    """
    if not (math.isfinite(value) and value >= 0):
        raise ConfigurationError(f"{flag} to be a finite number >= 0", repr(value), "Correct it.")
    return value


def parse_orthogonality_weights(text: str) -> Tuple[float, float, float, float]:
    """The four numbers of ``--orthogonality-weights``.

    Raises:
        ConfigurationError: not four numbers, or one of them no weight.
    """
    flag = "--orthogonality-weights"
    try:
        l1, l2, l3, l4 = (float(part) for part in str(text).split(","))
    except ValueError:
        raise ConfigurationError(
            f"{flag} to be four numbers separated by commas, l1,l2,l3,l4",
            repr(text),
            "For example: --orthogonality-weights 0.01,0.01,0,0.",
        ) from None
    for weight in (l1, l2, l3, l4):
        checked_weight(flag, weight)
    return l1, l2, l3, l4


def parse_interval(text: str) -> Optional[int]:
    """``--penalty-interval`` as a number of updates, ``None`` for ``auto``.

    Raises:
        ConfigurationError: neither ``auto`` nor a whole number from 1.
    """
    if text == "auto":
        return None
    if not str(text).isdigit() or int(text) < 1:
        raise ConfigurationError(
            "--penalty-interval to be 'auto' or a whole number >= 1",
            repr(text),
            "Correct it.",
        )
    return int(text)


def interval_for(num_words: int) -> int:
    """The automatic ``--penalty-interval`` for a dictionary of ``num_words``."""
    return 1 if num_words < LARGE_DICTIONARY else num_words // WORDS_PER_INTERVAL_STEP
