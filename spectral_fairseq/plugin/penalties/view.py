"""What penalties can be computed from, each a function of a model or of what it made of a batch.

Tables are float32, and padding and ``madeupword`` rows are marked as excluded. A need raises
:class:`ConfigurationError` if the model lacks it; ```weight``` in the message stands for the flag
of the penalty that asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from fairseq.models.fconv import FConvDecoder
from torch import Tensor, nn

from spectral_fairseq import refusals
from spectral_fairseq.embeddings import SVDEmbedding, WeightNormEmbedding
from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.functional.products import row_norms as row_norms_of
from spectral_fairseq.functional.row_penalties import smoothed_log_counts
from spectral_fairseq.functional.spectra import singular_values as singular_values_of
from spectral_fairseq.functional.spectrum_penalties import check_rank
from spectral_fairseq.options import Option
from spectral_fairseq.plugin.counts import training_counts
from spectral_fairseq.plugin.models import find
from spectral_fairseq.plugin.models.tables import uncounted_rows
from spectral_fairseq.plugin.spectrum_control.prior import TablePrior

# Constants of a criterion on the devices of its models.


class PerDevice:
    """A constant tensor, which is copied to a device only once: each copy keeps a GPU waiting.

    Args:
        constant: on any device.
    """

    def __init__(self, constant: Tensor) -> None:
        self._copies: Dict[torch.device, Tensor] = {constant.device: constant}

    def on(self, device: torch.device) -> Tensor:
        """The constant on ``device``."""
        if device not in self._copies:
            self._copies[device] = next(iter(self._copies.values())).to(device)
        return self._copies[device]


class Words:
    """What penalties know of a target dictionary.

    Args:
        dictionary: the dictionary itself.
        task: the task in whose training data its special symbols are counted, if any.

    Attributes:
        rows: N, the number of rows of a table for it.
        excluded: indices of the rows that are not words: padding and ``madeupword`` fillers.
    """

    def __init__(self, dictionary: Any, task: Any = None) -> None:
        self.dictionary = dictionary
        self._task = task
        self.rows = len(dictionary)
        self.excluded = torch.tensor(uncounted_rows(dictionary))
        self._excluded = PerDevice(self.excluded)

    def excluded_on(self, device: torch.device) -> Tensor:
        """``excluded`` on the device of a table."""
        return self._excluded.on(device)

    @cached_property
    def log_counts(self) -> Tensor:
        """Smoothed log counts of the words in the training data, shape (N,).

        Raises:
            DataError: the dictionary has no counts.
        """
        return smoothed_log_counts(training_counts(self._task, self.dictionary))


class Batch(NamedTuple):
    """A batch of an update.

    Args:
        net_output: of the model.
        targets: words, shape (B, T).
    """

    net_output: Any
    targets: Tensor


@dataclass(frozen=True)
class Parts:
    """What a criterion works with in a model, found once.

    It does not hold the model itself, so it can be kept as long as that lives.

    Attributes:
        decoder: ends in the vocabulary.
        words: of its dictionary.
        prior: of its output table, where that knows none itself.
        svd_tables: all SVD tables of the model, each once however often it is shared.
        look_ups: the modules that embed tokens.
        model_name: of the model's class, for messages.
    """

    decoder: nn.Module
    words: Words
    prior: TablePrior
    svd_tables: Tuple[SVDEmbedding, ...] = ()
    look_ups: Tuple[nn.Module, ...] = ()
    model_name: str = ""


class ModelView:
    """A model at one update; what several penalties need of it is computed once.

    Args:
        parts: of the model.
        batch: what the model has just computed, and for what; ``None`` outside of an update.
    """

    def __init__(self, parts: Parts, batch: Optional[Batch] = None) -> None:
        self.parts, self.batch = parts, batch
        self.decoder, self.words = parts.decoder, parts.words
        self._found: Dict[Need, Any] = {}

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.decoder.parameters()).device

    def get(self, need: Need) -> Any:
        """What ``need`` returns for this model."""
        if need not in self._found:
            self._found[need] = need(self)
        return self._found[need]


Need = Callable[[ModelView], Any]


class OutputTable(NamedTuple):
    """The table W of the softmax.

    Args:
        weight: W, shape (N, d).
        excluded: indices of the rows that are not counted, shape (m,).
    """

    weight: Tensor
    excluded: Tensor


class RowNorms(NamedTuple):
    """The norms of the rows of the output table.

    Args:
        norms: ||W_j||, shape (N,).
        excluded: indices of the rows that are not counted, shape (m,).
    """

    norms: Tensor
    excluded: Tensor


def output_table(view: ModelView) -> OutputTable:
    """The output table, of any kind; a factored one is multiplied out."""
    weight = find.output_table(view.decoder, view.words.rows).float()
    return OutputTable(weight, view.words.excluded_on(weight.device))


def row_norms(view: ModelView) -> RowNorms:
    """The norms of the rows of the output table, which a weight-norm table stores."""
    table = find.table_module(view.decoder)
    if isinstance(table, WeightNormEmbedding):
        return RowNorms(table.norms(), table.excluded_rows)
    weight, excluded = view.get(output_table)
    return RowNorms(row_norms_of(weight), excluded)


def singular_values(view: ModelView) -> Tensor:
    """The singular values of the output table, shape (d,); the learned ones of an SVD table."""
    table = find.table_module(view.decoder)
    if isinstance(table, SVDEmbedding):
        return table.singular_values()
    weight, excluded = view.get(output_table)
    check_rank(weight, excluded)
    return singular_values_of(weight, excluded)


def svd_tables(view: ModelView) -> Tuple[SVDEmbedding, ...]:
    """All SVD tables of the model; at least one."""
    if not view.parts.svd_tables:
        raise ConfigurationError(
            "a model with an SVD table for `weight`",
            f"none in {view.parts.model_name}",
            "Use --embedding-type svd with an arch of this package, or drop `weight`.",
        )
    return view.parts.svd_tables


class LayerStates(NamedTuple):
    """The decoder's hidden states of a batch.

    Args:
        layers: the output of each layer, shape (B, T, d) each; none if LayerDrop dropped all.
        counted: shape (B, T), false at padding.
    """

    layers: List[Tensor]
    counted: Tensor


def layer_states(view: ModelView) -> Optional[LayerStates]:
    """The outputs of the decoder's layers; ``None`` outside of an update.

    What a decoder tells is known when it has run; those that are known to tell nothing are refused
    before training.
    """
    decoder = view.decoder
    if view.batch is None:
        if isinstance(decoder, FConvDecoder) or any(
            isinstance(module, (nn.RNNBase, nn.RNNCellBase)) for module in decoder.modules()
        ):
            raise refusals.NO_LAYERS.error(f"{type(decoder).__name__}, which does not")
        return None
    net_output, targets = view.batch
    extra = net_output[1] if len(net_output) > 1 else None
    states = extra.get("inner_states") if isinstance(extra, dict) else None
    if not states:
        raise refusals.NO_LAYERS.error(f"{type(decoder).__name__}, which does not")
    # Without the embeddings; LayerDrop may have dropped all layers.
    layers = [layer.transpose(0, 1) for layer in states[1:]]
    counted = targets.ne(view.words.dictionary.pad())
    # Some likelihoods run each sentence several times, one after the other.
    return LayerStates(layers, counted.repeat_interleave(states[0].size(1) // len(counted), 0))


# What a penalty is: one declaration, from which its flags, checks, values and logs follow.


@dataclass(frozen=True)
class Penalty:
    """A term ``weight * R`` of the objective, R a function of the model's parameters.

    Args:
        name: key of R in the training logs.
        weight: flag of the weight; a weight of 0 costs nothing. A flag that parses to several
            numbers weighs the parts of R, which then enters the objective as it is.
        needs: what R is computed from, one of the functions above; it refuses models that lack it,
            and finds ``None`` where it is a matter of a batch and there is none.
        value: R, a scalar, from what ``needs`` found and the options: the parsed values of all
            flags of this penalty, by name. Called in float32, outside autocast.
        settings: further flags.
        for_words: completes the options for a dictionary; called once for each dictionary.
        lazy: whether R of a model is computed every k-th update only; see Note [Lazy penalties].
    """

    name: str
    weight: Option
    needs: Need
    value: Callable[[Any, Any], Tensor]
    settings: Tuple[Option, ...] = ()
    for_words: Callable[[Any, Words], Any] = lambda options, _: options
    lazy: Callable[[ModelView], bool] = lambda _: True

    @property
    def flags(self) -> Tuple[Option, ...]:
        """All flags of this penalty."""
        return (self.weight, *self.settings)

    def factor(self, options: Any) -> float:
        """The factor of R in the objective; 0 if the penalty is off."""
        weight = getattr(options, self.weight.name)
        return float(any(weight)) if isinstance(weight, tuple) else weight


class Term(NamedTuple):
    """One term of the objective at one update.

    Args:
        name: key in the training logs.
        weight: the factor of ``value``.
        value: R, a float32 scalar.
    """

    name: str
    weight: float
    value: Tensor
