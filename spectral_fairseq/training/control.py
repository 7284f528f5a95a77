"""Control of the spectrum of a plain table between the steps of any optimiser.

What is done is told in :mod:`spectral_fairseq.functional.table_control`; the defaults are those of
the criterion ``spectrum_control`` for a plain table. Of a table that is split by rows a worker
changes its part.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Dict, Optional, Sequence, Tuple, Union
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from spectral_fairseq.errors import ConfigurationError, UnsupportedError, check_range, listed
from spectral_fairseq.functional.row_blocks import check_finite
from spectral_fairseq.functional.spectrum_penalty import Prior, check_rank
from spectral_fairseq.functional.table_control import apply_change_, counted_norm
from spectral_fairseq.functional.workers import Workers, has_workers
from spectral_fairseq.methods.control import ControlRule
from spectral_fairseq.methods.prior import TablePrior
from spectral_fairseq.training.output_layer import output_layer, weight_of
from spectral_fairseq.training.row_shard import part_of, row_shard
from spectral_fairseq.training.table_checks import (
    check_has_owner,
    check_not_sharded,
    check_table,
    check_trained,
    excluded_rows,
)

# The controls that follow each optimiser.
_FOLLOWERS: WeakKeyDictionary[Any, WeakSet[SpectrumControl]] = WeakKeyDictionary()

# A peak below this share of the rate that the optimiser was made with is warned of.
_LOW_PEAK = 0.1


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
            :class:`~spectral_fairseq.functional.spectrum_penalty.Prior`. An automatic ``c1``
            refers to the norm that the table has when it is bound.
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
        UnsupportedError: a table of 16 bits, quantised, trained under DeepSpeed, or split over
            devices in another way than by rows (tensor parallelism, FSDP 1).
    """

    def __init__(
        self,
        model: Optional[Union[nn.Module, Tensor]] = None,
        *,
        decay: float = ControlRule.decay,
        slack: float = ControlRule.slack,
        centering: float = ControlRule.centering,
        every: int = ControlRule.every,
        start: int = ControlRule.start,
        side: str = ControlRule.side,
        scale: str = ControlRule.scale,
        prior: str = Prior.kind,
        c1: Optional[float] = Prior.c1,
        c2: float = Prior.c2,
        gamma: Optional[float] = Prior.gamma,
        excluded: Optional[Sequence[int]] = None,
        group: Any = None,
    ) -> None:
        self.rule = ControlRule(decay, slack, centering, every, start, side, scale)
        self._prior = TablePrior(Prior(prior, c1, c2, gamma))
        self.updates = 0
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
        weight = _controlled(model)
        excluded = excluded_rows(self._given_excluded, model, weight)
        count, dim = weight.size(0) - len(excluded), weight.size(1)
        check_rank(count, dim, "SpectrumControl", "leave the control out")
        self._prior.prior.spectrum(dim, 1.0)  # which refuses one that is too steep
        norm = None
        if not weight.is_meta:
            part, own = part_of(weight, excluded)
            norm = counted_norm(part.rows, own, part.summed)
            if not math.isfinite(norm):
                check_finite(weight.detach(), "the table")
        self._model, self.excluded = model, excluded
        self._prior.start_norm = norm or None  # a table of zeros has none yet
        self._checked, self.updates = False, 0
        self._left: Optional[float] = None  # the table's norm after the latest change
        self._has_warned = False
        self._sees_gradients = False  # of the optimiser that it follows, after a step
        self._has_begun = False  # whether that one is in a step that was not counted yet
        self._rates: Optional[Tuple[float, float]] = None  # the first one and the highest so far

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
        return _controlled(self._bound_model())

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
        part, excluded = part_of(weight, self.excluded)
        groups = (part.group or self._group, *part.copies)
        own, *others = (_workers(group, together=part.group is not None) for group in groups)
        planned = None
        if own.plans:
            prior = self._prior(part.rows, excluded, part.summed)
            planned = self.rule.plan(
                part.rows, min(1.0, rate), prior=prior, excluded=excluded, summed=part.summed
            )
        change = own.share_change(planned, part.rows)
        for copies in others:
            change = copies.share_change(change, part.rows)
        watched = not self._has_warned
        if watched:
            self._warn_if_untrained(counted_norm(part.rows, excluded, part.summed), rate)
        apply_change_(part.rows, change, excluded)
        if watched:
            self._left = counted_norm(part.rows, excluded, part.summed)
        return True

    def _warn_if_untrained(self, norm: float, rate: float) -> None:
        """Say it once if nothing but this control has changed the table since the last time."""
        if rate > 0 and norm == self._left:
            self._has_warned = True
            warnings.warn(
                "SpectrumControl has found its table unchanged since its last change: if the model "
                "that is trained is another one, such as a copy, make the control of that one",
                stacklevel=3,
            )

    def _warn_of_low_peak(self, rate: float, highest: float) -> None:
        """Say it once if a schedule falls again far below the rate that counts as its highest."""
        if self._rates is None:
            # One that is met in its course may have had its peak before.
            self._rates = (rate, math.inf if self.updates else rate)
        first, peak = self._rates
        if first < peak < _LOW_PEAK * highest and rate < peak:
            warnings.warn(
                f"the learning rate has risen to {peak:g} and falls again, where the optimiser was "
                f"made with {highest:g}, which SpectrumControl takes for the highest one of the "
                f"schedule: it goes no more than {peak / highest:.2g} of the way that its `decay` "
                "and `centering` say. Make the optimiser with the highest rate that it will have, "
                "and let the schedule multiply it by numbers up to 1",
                stacklevel=3,
            )
            peak = math.inf
        self._rates = (first, max(peak, rate))

    def follow(self, optimizer: Any) -> SpectrumControl:
        """Call :meth:`step` after each step that an optimiser takes, at its rate of that step.

            control = SpectrumControl(model)
            control.follow(optimizer)

        A step that is skipped, as by a ``GradScaler``, or for lack of any gradient, as where
        Lightning's ``training_step`` returns ``None``, counts for nothing, and an optimiser is
        followed once however often this is called. The share of the highest rate is that of
        :func:`share_of_rate`. A copy of this control follows none until this is called, since
        copies of optimisers call nobody either.

        Args:
            optimizer: of torch, or as accelerate prepares it.

        Returns:
            This control.

        Raises:
            ConfigurationError: the optimiser does not have the table.
            UnsupportedError: before torch 2.0, whose optimisers call nobody.
        """
        optimizer = _of_torch(optimizer)
        check_trained(self.weight, optimizer.param_groups, "SpectrumControl")
        if not hasattr(optimizer, "register_step_post_hook"):
            wanted = "an optimiser of torch 2.0 or newer, which tells of its steps"
            found = f"{type(optimizer).__name__} without register_step_post_hook"
            raise UnsupportedError(wanted, found, "Call step after each of its steps yourself.")
        followers = _FOLLOWERS.setdefault(optimizer, WeakSet())
        if self not in followers:
            followers.add(self)
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
        return self

    def follows(self, optimizer: Any) -> bool:
        """Whether :meth:`follow` was called with this optimiser, which may be any trainer's."""
        optimizer = _of_torch(optimizer)
        is_of_torch = isinstance(optimizer, torch.optim.Optimizer)
        return is_of_torch and self in _FOLLOWERS.get(optimizer, ())

    def _before_step(self, *_: Any) -> None:
        self._has_begun = True

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        # torch tells of a step twice where a class's step calls that of the class above it.
        if not self._has_begun:
            return
        self._has_begun = False
        # Fused optimisers are told by the scaler that they shall leave the parameters alone.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return
        # Some optimisers drop gradients before this, and some need none; the others took no step.
        has_gradients = any(
            parameter.grad is not None
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        self._sees_gradients = self._sees_gradients or has_gradients
        if has_gradients or not self._sees_gradients:
            self.step(share_of_rate(self, optimizer))

    def state_dict(self) -> Dict[str, Any]:
        """What a resumed training needs beside the model: numbers that JSON can hold."""
        return {"updates": self.updates, "start_norm": self._prior.start_norm}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Go on from the state of :meth:`state_dict`.

        Raises:
            ConfigurationError: it is another state.
        """
        if set(state) != set(self.state_dict()):
            found = f"one with {listed([*map(str, state)], 9)}"
            remedy = "Pass what state_dict() of a SpectrumControl returned."
            raise ConfigurationError(f"a state with {', '.join(self.state_dict())}", found, remedy)
        self.updates, self._prior.start_norm = int(state["updates"]), state["start_norm"]


def _of_torch(optimizer: Any) -> Any:
    """The optimiser inside that of accelerate."""
    return getattr(optimizer, "optimizer", optimizer)


def _controlled(model: Union[nn.Module, Tensor]) -> Tensor:
    """The table of a model, which can be controlled."""
    layer = output_layer(model) if isinstance(model, nn.Module) else None
    weight = weight_of(model if layer is None else layer, "SpectrumControl")
    if row_shard(weight) is None:
        check_not_sharded(weight)
    check_table(weight, "SpectrumControl", layer)
    return weight


def _workers(group: Any, together: bool) -> Workers:
    first = 0 if group is None else torch.distributed.get_global_rank(group, 0)
    return Workers(group, first, together)


def share_of_rate(control: SpectrumControl, optimizer: Any) -> float:
    """The present learning rate of the controlled table, as a share of the highest of its schedule.

    The schedulers of torch keep the rate that they multiply as ``initial_lr``, and those that rise
    above it (one cycle) their peak as ``max_lr``. Where neither is kept, as by ReduceLROnPlateau,
    the first rate counts as the highest, and is kept with the optimiser's state from then on, as
    ``highest_lr``; and so is each rate that exceeds all of these, as by CyclicLR. The peak of a
    schedule that stays far below the rate that it multiplies is not known before it is passed;
    then there is a warning.
    """
    weight = control.weight
    groups = optimizer.param_groups
    table_groups = [
        group for group in groups if any(parameter is weight for parameter in group["params"])
    ]
    group = (table_groups or groups)[0]
    if group["lr"] is None:  # Adafactor chooses its rate itself
        return 1.0
    # `initial_lr` is torch's own: a scheduler that is made later would multiply what stands there.
    rate, names = float(group["lr"]), ("initial_lr", "max_lr", "highest_lr")
    known = [float(group[name]) for name in names if group.get(name) is not None]
    highest = max([rate, *known])
    if highest not in known:
        group["highest_lr"] = highest
    control._warn_of_low_peak(rate, highest)
    return rate / highest if highest > 0 else 1.0
