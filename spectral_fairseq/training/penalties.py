"""Penalties on the output table of a model that exists, weighted and summed.

They are those of :mod:`spectral_fairseq.methods.penalties`, also on the factors of a table.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

import torch
from torch import Tensor, nn

from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.errors import (
    ConfigurationError,
    arguments_as_flags,
    check_choice,
    check_range,
    listed,
)
from spectral_fairseq.functional.precision import widened
from spectral_fairseq.functional.row_blocks import check_finite
from spectral_fairseq.methods.penalties import (
    PENALTIES,
    OutputTable,
    Penalty,
    PerDevice,
    weight_and_excluded,
)
from spectral_fairseq.methods.prior import TablePrior, prior_of
from spectral_fairseq.training.factored_layers import FactoredLayer
from spectral_fairseq.training.output_layer import output_layer, weight_of
from spectral_fairseq.training.table_checks import check_not_sharded, excluded_rows


class _TableOf(OutputTable):
    """The output table of a model of torch, with the rows of it that are left out.

    Attributes:
        stored: W, or the first entry of a table of factors, which has N rows as well.
    """

    def __init__(
        self, model: Union[nn.Module, Tensor], excluded: PerDevice, prior: TablePrior
    ) -> None:
        super().__init__()
        self._excluded, self._prior = excluded, prior
        layer = output_layer(model) if isinstance(model, nn.Module) else None
        self.module = None
        if isinstance(layer, FactoredLayer):  # whose matrix is computed where it is needed alone
            self.module = layer.used_table
            self.stored: Tensor = next(self.module.parameters())
        else:
            self.stored = weight_of(model, "TablePenalty")
            check_not_sharded(self.stored)
        self.svd_tables = (self.module,) if isinstance(self.module, SVDEmbedding) else ()

    @property
    def device(self) -> torch.device:
        """See the base class."""
        return self.stored.device

    @property
    def excluded(self) -> Tensor:
        """See the base class."""
        return self._excluded.on(self.device)

    def weight(self) -> Tensor:
        """See the base class."""
        return widened(self.stored if self.module is None else self.module.weight)

    def prior(self) -> Tensor:
        """See the base class."""
        return self._prior(*self.get(weight_and_excluded))

    def refuse_without_svd_table(self) -> None:
        """See the base class."""
        wanted, remedy = "a table of factors for `weight`", "Call factor_(model) first."
        raise ConfigurationError(wanted, "one without", remedy)


class TablePenalty:
    """The weighted sum of penalties on a model's output table: sum_i weight_i R_i.

    Add it to a mean loss per token, or pass it as ``penalty`` of
    :func:`~spectral_fairseq.training.losses.fused_loss_`; see ``token_loss.py``, Note [One scale].

    Args:
        model: as for :class:`~spectral_fairseq.training.control.SpectrumControl`; ``None`` leaves
            it to :meth:`bind`, which ``fused_loss_`` and ``mixture_`` call with theirs.
        excluded: rows that are left out, though not of the factors of a table of ``factor_``;
            negative ones are counted from the end. ``None`` takes ``padding_idx`` of the look-ups
            that share the table; pass ``()`` where that row is a word too, such as the end of a
            text.
        **options: weights, by the names of
            :data:`~spectral_fairseq.methods.penalties.PENALTIES`, such as ``cosine=1.0``, and their
            settings: ``norm_target``, nu of ``weight_norm``, and ``prior``, ``c1``, ``c2`` and
            ``gamma`` of ``spectrum`` for a table without factors. Of a table of ``factor_`` the
            singular values are the learned ones; ``orthogonality``, the sum of the squared
            distances of U'U and V'V from I, is for such a table only. An automatic ``c1`` refers to
            the norm that the table has when it is bound: a training that is resumed from another
            process takes it from :meth:`state_dict`.

    Raises:
        ConfigurationError: an unknown name, a value outside its range, a row that is not in the
            table, no table, ``orthogonality`` of a table without factors, or a penalty on singular
            values of one with fewer rows than dimensions.
    """

    def __init__(
        self,
        model: Optional[Union[nn.Module, Tensor]] = None,
        *,
        excluded: Optional[Sequence[int]] = None,
        **options: Any,
    ) -> None:
        settings = [entry for penalty in PENALTIES for entry in penalty.settings if entry.argument]
        names = [penalty.name for penalty in PENALTIES]
        for name in options:
            check_choice(
                "a penalty or setting", name, [*names, *(entry.argument for entry in settings)]
            )
        self.weights = {name: options.get(name, 0.0) for name in names}
        for name, weight in self.weights.items():
            check_range(f"`{name}`", weight, at_least=0)
        values = {
            entry.argument: entry.as_argument(options.get(entry.argument, entry.default))
            for entry in settings
        }
        self._given_excluded = excluded
        self._given_prior = prior_of(values)
        self._options = {one.name: one.for_words(_options(one, values), None) for one in PENALTIES}
        self.model: Optional[Union[nn.Module, Tensor]] = None
        if model is not None:
            self.bind(model)

    @property
    def _active(self) -> List[Penalty]:
        # Not kept, since a declaration cannot be pickled, and a model that has a loss may have to.
        return [penalty for penalty in PENALTIES if self.weights[penalty.name]]

    def bind(self, model: Union[nn.Module, Tensor]) -> None:
        """Take the table of a model from now on.

        Args:
            model: as for the constructor.

        Raises:
            ConfigurationError: as the constructor.
            UnsupportedError: a table that is split over devices; bind it before ``fully_shard``.
        """
        prior, given = TablePrior(self._given_prior), self._given_excluded
        table = _TableOf(model, _rows(()), prior)
        if given is None and table.module is not None:
            given = table.module.excluded
        excluded = excluded_rows(given, model, table.stored)
        left_out = _rows(excluded)
        table = _TableOf(model, left_out, prior)
        if table.device.type != "meta":
            with torch.no_grad():
                for penalty in self._active:
                    with arguments_as_flags(weight=f"`{penalty.name}`"):
                        table.get(penalty.needs)
        self.model, self.excluded, self._prior = model, excluded, prior
        self._left_out = left_out

    @property
    def is_trained(self) -> bool:
        """Whether its table is trained; no penalty changes a frozen one."""
        layer = output_layer(self.model) if isinstance(self.model, nn.Module) else None
        if isinstance(layer, FactoredLayer):
            return any(entry.requires_grad for entry in layer.stored_table.parameters())
        return weight_of(self.model, "TablePenalty").requires_grad

    def state_dict(self) -> Dict[str, Any]:
        """What a resumed training needs beside the model: numbers that JSON can hold.

        Raises:
            ConfigurationError: it has no model.
        """
        self._check_bound()
        return {"start_norm": self._prior.start_norm}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Go on from the state of :meth:`state_dict`; bind the model before.

        Raises:
            ConfigurationError: it is another state, or there is no model.
        """
        self._check_bound()
        if set(state) != {"start_norm"}:
            found = f"one with {listed([*map(str, state)], 9)}"
            remedy = "Pass what state_dict() of a TablePenalty returned."
            raise ConfigurationError("a state with start_norm", found, remedy)
        self._prior.start_norm = state["start_norm"]

    def _check_bound(self) -> None:
        if self.model is None:
            raise ConfigurationError(
                "a TablePenalty of a model",
                "one that was made without",
                "Pass the model to TablePenalty, or the penalty to fused_loss_ or mixture_.",
            )

    def terms(self) -> Dict[str, Tensor]:
        """Each R before its weight, by name.

        Raises:
            ConfigurationError: it has no model.
            DataError: the table has infinity or NaN in it.
            UnsupportedError: the table is split over devices at this moment.
        """
        self._check_bound()
        assert self.model is not None
        table = _TableOf(self.model, self._left_out, self._prior)
        terms = {one.name: one.of(table, self._options[one.name]) for one in self._active}
        finite = [torch.isfinite(term) for term in terms.values()]
        if finite and not bool(torch.stack(finite).all()):  # a GPU is waited for once
            check_finite(table.weight().detach(), "the table of TablePenalty")
        return terms

    def __call__(self) -> Tensor:
        """The weighted sum, a scalar."""
        terms = [self.weights[name] * term for name, term in self.terms().items()]
        return functools.reduce(torch.add, terms) if terms else torch.zeros((), device="cpu")


def _rows(indices: Sequence[int]) -> PerDevice:
    return PerDevice(torch.tensor(indices, dtype=torch.long, device="cpu"))


def _options(penalty: Penalty, values: Mapping[str, Any]) -> Any:
    """The values of a penalty's flags; what is no argument here has its default."""
    named = {
        entry.name: values[entry.argument] if entry.argument else entry.parsed(entry.default)
        for entry in penalty.settings
    }
    return SimpleNamespace(**{penalty.weight.name: penalty.unit, **named})
