"""What shapes the output table of a model that exists: control between steps, penalties in a loss.

:class:`SpectrumControl` changes a plain table between the steps of any optimiser; what is done is
told in :mod:`spectral_fairseq.functional.table_control`, and the defaults are those of the
criterion ``spectrum_control`` for a plain table. :class:`TablePenalty` is the weighted sum of the
penalties of :mod:`spectral_fairseq.functional`, also on the factors of a table.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.errors import (
    ConfigurationError,
    UnsupportedError,
    check_choice,
    check_range,
    listed,
)
from spectral_fairseq.functional.row_blocks import check_finite
from spectral_fairseq.functional.row_norms import row_norms
from spectral_fairseq.functional.row_penalties import (
    cosine_penalty,
    weight_norm_penalty,
)
from spectral_fairseq.functional.spectra import singular_values
from spectral_fairseq.functional.spectrum_penalties import (
    Prior,
    check_rank,
    d_optimal_penalty,
    normalized_d_optimal_penalty,
    orthogonality_penalty,
    spectral_normalization_penalty,
    spectrum_penalty,
)
from spectral_fairseq.functional.table_control import (
    ControlRule,
    TableChange,
    apply_change_,
    counted_norm,
    has_workers,
    shared_plan,
)
from spectral_fairseq.training.modules import (
    check_has_owner,
    check_not_sharded,
    check_table,
    check_trained,
    excluded_rows,
    output_layer,
    rows_of_padding,
    weight_of,
    without_wrappers,
)
from spectral_fairseq.training.tables import FactoredLayer

# Control of a plain table between steps. Of one that is split by rows a worker has a part.


class RowShard(NamedTuple):
    """The rows that this worker holds of a table that ``fully_shard`` (FSDP 2) may have split.

    Attributes:
        rows: shape (n, d), in the memory of the parameter; writing to it changes the table.
        start: index of the first one in the whole table.
        group: of the workers that hold the other rows; ``None`` if there are none.
    """

    rows: Tensor
    start: int
    group: Any

    def own(self, places: Sequence[int]) -> List[int]:
        """Those of the indices of the whole table that are here, counted from ``start``."""
        end = self.start + len(self.rows)
        return [place - self.start for place in places if self.start <= place < end]

    def summed(self, part: Tensor) -> Tensor:
        """The sum of a tensor over the workers."""
        if self.group is None:
            return part
        total = part.contiguous().clone()
        torch.distributed.all_reduce(total, group=self.group)
        return total


@torch.no_grad()
def row_shard(weight: Tensor) -> Optional[RowShard]:
    """The part of a table on this worker; ``None`` if it is not split by rows alone.

    A table that is also copied to other groups of workers (HSDP) is split in the same way in each.

    Args:
        weight: of any kind, shape (N, d).
    """
    if not any(kind.__name__ == "DTensor" for kind in type(weight).__mro__):
        return None
    table: Any = weight
    split = [
        (axis, place) for axis, place in enumerate(table.placements) if not place.is_replicate()
    ]
    if len(split) != 1 or type(split[0][1]).__name__ != "Shard" or split[0][1].dim != 0:
        return None
    axis, mesh = split[0][0], table.device_mesh
    chunk = -(-table.size(0) // mesh.size(axis))
    start = min(mesh.get_local_rank(axis) * chunk, table.size(0))
    rows = table.to_local()
    if len(rows) != min(chunk, table.size(0) - start):  # not in equal pieces, the last one smaller
        return None
    return RowShard(rows.detach(), start, mesh.get_group(axis))


class SpectrumControl:
    """Decoupled spectrum control and centring of one table.

    Call :meth:`step` after each step of the optimiser. Where ``torch.distributed`` has several
    workers, all of them have to call it: the first one plans the change and the others receive it,
    so that equal tables stay equal bit for bit. Of a table that is split by rows (``fully_shard``)
    each worker changes its own rows; their Gram matrices, d x d, are all that is summed.

    Args:
        model: a model with an output layer (of transformers, or with an ``lm_head``), a layer, or
            a weight of shape (N, d) that stays the trained one. The table of a model is looked up
            at each step, so it may be moved, compiled, or wrapped by ``DistributedDataParallel``
            afterwards. ``None`` leaves it to :meth:`bind`, which the callbacks of
            :mod:`spectral_fairseq.training.callbacks` call with the model that is trained.
        decay: eta, the share of the way to the target for each step at the highest learning rate,
            in [0, 1]; 0 leaves the spectrum alone.
        centering: eta', likewise for the mean vector.
        every: k, at least 1; the change of k steps is made at once.
        start: steps before the control begins.
        side: ``above`` moves what exceeds ``slack`` times the prior back to that bound; ``both``
            moves every singular value to the prior.
        slack: factor on the prior of ``above``, >= 1.
        scale: ``free`` gives the prior the norm of the table at each change; ``fixed`` takes it as
            it is.
        prior: ``exponential`` or ``polynomial``; with ``c1``, ``c2`` and ``gamma`` as of
            :class:`~spectral_fairseq.functional.spectrum_penalties.Prior`. An automatic ``c1``
            refers to the norm that the table has when this object is made.
        excluded: rows that are left alone and not counted. ``None`` takes ``padding_idx`` of the
            look-ups that share the table; pass ``()`` where that row is a word too, such as the
            end of a text.
        group: process group of the workers that hold the same table; ``None`` is all of them. A
            table that is split knows its own.

    Attributes:
        rule: what is done, and when.
        excluded: indices of the rows that are left alone.
        updates: number of steps so far.

    Raises:
        ConfigurationError: an option outside its range; no output table, one that is frozen or
            computed from other parameters, or one with fewer rows than columns.
        UnsupportedError: a table of 16 bits, quantised, or split over devices in another way than
            by rows (tensor parallelism, FSDP 1, DeepSpeed's third stage).
    """

    def __init__(
        self,
        model: Optional[Union[nn.Module, Tensor]] = None,
        *,
        decay: float = 0.01,
        slack: float = 3.0,
        centering: float = 0.01,
        every: int = 10,
        start: int = 0,
        side: str = "above",
        scale: str = "free",
        prior: str = "exponential",
        c1: Optional[float] = None,
        c2: float = 0.0005,
        gamma: Optional[float] = None,
        excluded: Optional[Sequence[int]] = None,
        group: Any = None,
    ) -> None:
        self.rule = ControlRule(decay, slack, centering, every, start, side, scale)
        self._prior = Prior(prior, c1, c2, gamma)
        self.updates = 0
        self._start_norm: Optional[float] = None
        self._given_excluded, self._group = excluded, group
        self._model: Optional[Union[nn.Module, Tensor]] = None
        if model is not None:
            self.bind(model)

    @property
    def is_bound(self) -> bool:
        """Whether it has a table."""
        return self._model is not None

    def bind(self, model: Union[nn.Module, Tensor]) -> None:
        """Control the table of a model from now on, with no step taken so far.

        Args:
            model: as for the constructor.

        Raises:
            ConfigurationError: as the constructor.
            UnsupportedError: likewise.
        """
        self._model, self._checked, self.updates = model, False, 0
        self._left: Optional[Tensor] = None
        weight, excluded = self.weight, self._given_excluded
        if excluded is None and isinstance(model, nn.Module):
            excluded = rows_of_padding(without_wrappers(model), weight)
        self.excluded = excluded_rows(excluded or (), weight.size(0))
        count, dim = weight.size(0) - len(self.excluded), weight.size(1)
        check_rank(count, dim, "SpectrumControl", "leave the control out")
        self._prior.spectrum(dim, 1.0)
        self._start_norm = None
        if not weight.is_meta:
            self._start_norm = self._norm(weight)
            if not math.isfinite(self._start_norm):
                check_finite(weight.detach(), "the table")

    def _bound_model(self) -> Union[nn.Module, Tensor]:
        if self._model is None:
            raise ConfigurationError(
                "a SpectrumControl of a model",
                "one that was made without",
                "Pass the model to SpectrumControl or to its bind, or the control to "
                "SpectralCallback, which takes the model that is trained.",
            )
        return self._model

    @property
    def weight(self) -> Tensor:
        """The table as it is now, shape (N, d), which is checked as in the constructor."""
        weight = weight_of(self._bound_model(), "SpectrumControl")
        if row_shard(weight) is None:
            check_not_sharded(weight)
        check_table(weight, "SpectrumControl")
        return weight

    def step(self, rate: float = 1.0) -> bool:
        """Count a step of the optimiser, and change the table if that is due.

        Args:
            rate: s, the learning rate of that step as a share of the highest one of its schedule,
                such as ``scheduler.get_last_lr()[0] / peak``; what exceeds 1 counts as 1.

        Returns:
            Whether the table was to be changed.

        Raises:
            ConfigurationError: a negative rate, or one that is not a number; with several workers,
                a weight that was passed, and that no layer and no optimiser has any more.
            DataError: the table has infinity or NaN in it; no worker writes anything then.
        """
        check_range("`rate`", rate, at_least=0)
        self._bound_model()
        self.updates += 1
        if not self.rule.is_due(self.updates):
            return False
        weight = self.weight
        if not self._checked and isinstance(self._model, Tensor) and has_workers():
            check_has_owner(weight, "SpectrumControl")  # once, since it takes long
        self._checked = True
        part, excluded = self._part(weight)
        group = part.group or self._group
        first = 0 if group is None else torch.distributed.get_global_rank(group, 0)
        plan = functools.partial(self.plan, weight, rate)
        together = part.group is not None
        change = shared_plan(plan, part.rows, group=group, first=first, together=together)
        if rate > 0:
            self._warn_if_untrained(part.rows)
        apply_change_(part.rows, change, excluded)
        self._left = _some_rows(part.rows)
        return True

    def _warn_if_untrained(self, rows: Tensor) -> None:
        """Say it once if nothing but this control has changed the table since the last time."""
        if self._left is not None and torch.equal(self._left, _some_rows(rows)):
            warnings.warn(
                "SpectrumControl has found its table twice as it had left it: if the model that is "
                "trained is another one, such as a copy, make the control of that one",
                stacklevel=3,
            )
            self._left = None

    def follow(self, optimizer: Any) -> SpectrumControl:
        """Call :meth:`step` after each step that an optimiser takes, at its rate of that step.

            control = SpectrumControl(model)
            control.follow(optimizer)

        A step that is skipped, as by a ``GradScaler``, counts for nothing. The share of the highest
        rate is that of :func:`share_of_rate`.

        Args:
            optimizer: of torch, or as accelerate prepares it.

        Returns:
            This control.

        Raises:
            ConfigurationError: the optimiser does not have the table.
            UnsupportedError: before torch 2.0, whose optimisers call nobody.
        """
        optimizer = getattr(optimizer, "optimizer", optimizer)  # inside that of accelerate
        check_trained(self.weight, optimizer.param_groups, "SpectrumControl")
        if not hasattr(optimizer, "register_step_post_hook"):
            wanted = "an optimiser of torch 2.0 or newer, which tells of its steps"
            found = f"{type(optimizer).__name__} without register_step_post_hook"
            raise UnsupportedError(wanted, found, "Call step after each of its steps yourself.")
        optimizer.register_step_post_hook(lambda *_: self.step(share_of_rate(self, optimizer)))
        return self

    @torch.no_grad()
    def plan(self, weight: Tensor, rate: float = 1.0) -> TableChange:
        """The change that is due to a matrix, which is not yet applied.

        Args:
            weight: the table, or the float32 copy that an optimiser trains, shape (N, d).
            rate: as for :meth:`step`.
        """
        part, excluded = self._part(weight)
        prior = functools.partial(self._spectrum, weight)
        return self.rule.plan(
            part.rows, min(1.0, rate), prior=prior, excluded=excluded, summed=part.summed
        )

    def _part(self, weight: Tensor) -> Tuple[RowShard, Tensor]:
        """The rows of a table that are here, and those of them that are left alone."""
        part = row_shard(weight) or RowShard(weight, 0, None)
        excluded = part.own(self.excluded)
        return part, torch.tensor(excluded, dtype=torch.long, device=part.rows.device)

    def _spectrum(self, weight: Tensor, _: Tensor) -> Tensor:
        self._start_norm = self._start_norm or self._norm(weight)
        return self._prior.spectrum(weight.size(1), self._start_norm).to(weight.device)

    def state_dict(self) -> Dict[str, Any]:
        """What a resumed training needs beside the model: numbers that JSON can hold."""
        return {"updates": self.updates, "start_norm": self._start_norm}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Go on from the state of :meth:`state_dict`.

        Raises:
            ConfigurationError: it is another state.
        """
        if set(state) != set(self.state_dict()):
            found = f"one with {listed([*map(str, state)], 9)}"
            remedy = "Pass what state_dict() of a SpectrumControl returned."
            raise ConfigurationError(f"a state with {', '.join(self.state_dict())}", found, remedy)
        self.updates, self._start_norm = int(state["updates"]), state["start_norm"]

    def _norm(self, weight: Tensor) -> float:
        part, excluded = self._part(weight)
        return counted_norm(part.rows, excluded, part.summed)


def _some_rows(rows: Tensor) -> Tensor:
    return rows[:: max(1, len(rows) // 16)].clone()


def share_of_rate(control: SpectrumControl, optimizer: Any) -> float:
    """The present learning rate of the controlled table, as a share of the highest of its schedule.

    The schedulers of torch keep the rate that they multiply as ``initial_lr``, and those that rise
    above it (one cycle) their peak as ``max_lr``. Where neither is kept, as by ReduceLROnPlateau,
    the first rate counts as the highest, and is kept with the optimiser's state from then on.
    """
    weight = control.weight
    groups = optimizer.param_groups
    table_groups = [
        group for group in groups if any(parameter is weight for parameter in group["params"])
    ]
    group = (table_groups or groups)[0]
    if group["lr"] is None:  # Adafactor chooses its rate itself
        return 1.0
    group.setdefault("initial_lr", float(group["lr"]))
    highest = max(float(group.get(name) or 0.0) for name in ("initial_lr", "max_lr"))
    return min(1.0, float(group["lr"]) / highest) if highest > 0 else 1.0


# Penalties on the table, weighted and summed.


def _of_spectrum(penalty: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda weight, excluded: penalty(singular_values(weight.float(), excluded))


OF_SPECTRUM = {
    "spectral_normalization": _of_spectrum(spectral_normalization_penalty),
    "d_optimal": _of_spectrum(d_optimal_penalty),
    "normalized_d_optimal": _of_spectrum(normalized_d_optimal_penalty),
}
PENALTIES: Dict[str, Callable[..., Tensor]] = {
    "cosine": cosine_penalty,
    **OF_SPECTRUM,
}
OF_FACTORS = ("spectrum", "orthogonality")


class TablePenalty:
    """The weighted sum of penalties on a model's output table: sum_i weight_i R_i.

    Add it to a mean loss per token, or pass it as ``penalty`` of
    :func:`~spectral_fairseq.training.losses.fused_loss_`; see Note [One scale] there.

    Args:
        model: as for :class:`~spectral_fairseq.training.control.SpectrumControl`; ``None`` leaves
            it to :meth:`bind`, which ``fused_loss_`` and ``mixture_`` call with theirs.
        weight_norm: weight of the distance of the vectors' norms from ``norm_target``.
        norm_target: nu of ``weight_norm``.
        excluded: rows that are left out; negative ones are counted from the end.
        **weights: of ``cosine``, ``spectral_normalization``, ``d_optimal`` and
            ``normalized_d_optimal``, whose definitions are those of
            :mod:`spectral_fairseq.functional`; for a table of ``factor_`` also of ``spectrum``,
            the distance of sigma from its prior, and of ``orthogonality``, the sum of the squared
            distances of U'U and V'V from I.

    Raises:
        ConfigurationError: an unknown name, a negative weight, a row that is not in the table, no
            table, a penalty on factors for a table without them, or one on singular values for one
            with fewer rows than dimensions.
    """

    def __init__(
        self,
        model: Optional[Union[nn.Module, Tensor]] = None,
        *,
        weight_norm: float = 0.0,
        norm_target: float = 1.0,
        excluded: Sequence[int] = (),
        **weights: float,
    ) -> None:
        known = ("weight_norm", *PENALTIES, *OF_FACTORS)
        for name, weight in {"weight_norm": weight_norm, **weights}.items():
            check_choice("a penalty", name, known)
            check_range(f"`{name}`", weight, at_least=0)
        self.weights, self._given_excluded = weights, excluded
        self.weight_norm, self.norm_target = weight_norm, norm_target
        self.model: Optional[Union[nn.Module, Tensor]] = None
        if model is not None:
            self.bind(model)

    def bind(self, model: Union[nn.Module, Tensor]) -> None:
        """Take the table of a model from now on.

        Args:
            model: as for the constructor.

        Raises:
            ConfigurationError: as the constructor.
            UnsupportedError: a table that is split over devices; bind it before ``fully_shard``.
        """
        table, weights = weight_of(model, "TablePenalty"), self.weights
        check_not_sharded(table)
        self.excluded = excluded_rows(self._given_excluded, table.size(0))
        self.model = model
        of_spectrum = [name for name in OF_SPECTRUM if weights.get(name)]
        if of_spectrum:
            count = len(table) - len(self.excluded)
            check_rank(count, table.size(1), ", ".join(of_spectrum), "drop these weights")
        if any(weights.get(name) for name in OF_FACTORS):
            self._factors()

    def _factors(self) -> SVDEmbedding:
        layer = output_layer(self.model) if isinstance(self.model, nn.Module) else None
        table = layer.used_table if isinstance(layer, FactoredLayer) else None
        if not isinstance(table, SVDEmbedding):
            wanted = f"a table of factors for {' and '.join(OF_FACTORS)}"
            remedy = "Call factor_(model) first, or use SpectrumControl."
            raise ConfigurationError(wanted, "one without", remedy)
        return table

    def terms(self) -> Dict[str, Tensor]:
        """Each R before its weight, by name.

        Raises:
            ConfigurationError: it has no model.
            DataError: the table has infinity or NaN in it.
            UnsupportedError: the table is split over devices at this moment.
        """
        if self.model is None:
            raise ConfigurationError(
                "a TablePenalty of a model",
                "one that was made without",
                "Pass the model to TablePenalty, or the penalty to fused_loss_ or mixture_.",
            )
        weight = weight_of(self.model, "TablePenalty")
        check_not_sharded(weight)
        rows = torch.tensor(self.excluded, dtype=torch.long, device=weight.device)
        penalties = {}
        for name, share in self.weights.items():
            if share and name in PENALTIES:
                penalties[name] = PENALTIES[name](weight, rows)
        if self.weight_norm:
            norms = row_norms(weight.float())
            penalties["weight_norm"] = weight_norm_penalty(norms, self.norm_target, rows)
        if self.weights.get("spectrum"):
            table = self._factors()
            penalties["spectrum"] = spectrum_penalty(table.singular_values(), table.prior())
        if self.weights.get("orthogonality"):
            grams = self._factors().grams()
            penalties["orthogonality"] = orthogonality_penalty(*grams, (1.0, 1.0, 0.0, 0.0))
        if not all(bool(torch.isfinite(term)) for term in penalties.values()):
            check_finite(weight.detach(), "the table of TablePenalty")
        return penalties

    def __call__(self) -> Tensor:
        """The weighted sum, a scalar."""
        weights = {**self.weights, "weight_norm": self.weight_norm}
        terms = [weights[name] * term for name, term in self.terms().items()]
        return functools.reduce(torch.add, terms) if terms else torch.zeros(())
