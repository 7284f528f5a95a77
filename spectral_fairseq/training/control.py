"""Control of a plain output table's spectrum between the steps of any optimiser.

What is done is told in :mod:`spectral_fairseq.functional.table_control`; the defaults are those of
the criterion ``spectrum_control`` for a plain table.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Dict, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from spectral_fairseq.errors import ConfigurationError, check_range, listed
from spectral_fairseq.functional.products import check_finite
from spectral_fairseq.functional.spectrum_penalties import Prior, check_rank
from spectral_fairseq.functional.table_control import (
    ControlRule,
    TableChange,
    apply_change_,
    counted_norm,
    has_workers,
    shared_plan,
)
from spectral_fairseq.training.modules import (
    RowShard,
    check_has_owner,
    check_table,
    excluded_rows,
    row_shard,
    weight_of,
    without_wrappers,
)


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
            afterwards.
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
            :func:`~spectral_fairseq.functional.spectrum_penalties.prior_spectrum`. An automatic
            ``c1`` refers to the norm that the table has when this object is made.
        excluded: rows that are left alone and not counted. ``None`` takes ``padding_idx`` of the
            look-ups that share the table; pass ``()`` where that row is a word too, such as the
            end of a text.
        group: process group of the workers that hold the same table; ``None`` is all of them. A
            table that is split knows its own.

    Attributes:
        rule: what is done, and when.
        updates: number of steps so far.

    Raises:
        ConfigurationError: an option outside its range; no output table, one that is frozen or
            computed from other parameters, or one with fewer rows than columns.
        UnsupportedError: a table of 16 bits, quantised, or split over devices in another way than
            by rows (tensor parallelism, FSDP 1, DeepSpeed's third stage).
    """

    def __init__(
        self,
        model: Union[nn.Module, Tensor],
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
        self._model, self._group, self._checked = model, group, False
        weight = self.weight
        self._excluded = self._rows(excluded, weight)
        count, dim = weight.size(0) - len(self._excluded), weight.size(1)
        check_rank(count, dim, "SpectrumControl", "leave the control out")
        self._prior.spectrum(dim, 1.0)
        self._start_norm: Optional[float] = None
        if not weight.is_meta:
            self._start_norm = self._norm(weight)
            if not math.isfinite(self._start_norm):
                check_finite(weight.detach(), "the table")

    @property
    def weight(self) -> Tensor:
        """The table as it is now, shape (N, d).

        Raises:
            ConfigurationError: as for the constructor.
            UnsupportedError: as for the constructor.
        """
        weight = weight_of(self._model, "SpectrumControl")
        check_table(weight, "SpectrumControl", whole=False)
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
        self.updates += 1
        if not self.rule.is_due(self.updates):
            return False
        weight = self.weight
        if not self._checked and isinstance(self._model, Tensor) and has_workers():
            check_has_owner(weight, "SpectrumControl")  # once, since it takes long
        self._checked = True
        rows, excluded, _ = self._own(weight)
        apply_change_(rows, self._shared_plan(weight, rate), excluded)
        return True

    @torch.no_grad()
    def plan(self, weight: Tensor, rate: float = 1.0) -> TableChange:
        """The change that is due to a matrix, which is not yet applied.

        Args:
            weight: the table, or the float32 copy that an optimiser trains, shape (N, d).
            rate: as for :meth:`step`.
        """
        rows, excluded, shard = self._own(weight)
        how = {} if shard is None else {"summed": shard.summed}
        prior = functools.partial(self._spectrum, weight)
        return self.rule.plan(rows, min(1.0, rate), prior=prior, excluded=excluded, **how)

    def _own(self, weight: Tensor) -> Tuple[Tensor, Tensor, Optional[RowShard]]:
        """The rows of a table that are here, and those of them that are left alone."""
        shard = row_shard(weight)
        if shard is None:
            return weight, self.excluded_on(weight.device), None
        excluded = shard.own(self._excluded)
        return shard.rows, torch.tensor(excluded, dtype=torch.long, device=shard.rows.device), shard

    def _spectrum(self, weight: Tensor, _: Tensor) -> Tensor:
        self._start_norm = self._start_norm or self._norm(weight)
        return self._prior.spectrum(weight.size(1), self._start_norm).to(weight.device)

    def excluded_on(self, device: torch.device) -> Tensor:
        """The rows that are left alone, shape (m,)."""
        return torch.tensor(self._excluded, dtype=torch.long, device=device)

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

    def _shared_plan(self, weight: Tensor, rate: float) -> TableChange:
        """The plan of the first worker, on every worker."""
        rows, _, shard = self._own(weight)
        group = self._group if shard is None else shard.group
        first = 0 if group is None else torch.distributed.get_global_rank(group, 0)
        plan = functools.partial(self.plan, weight, rate)
        return shared_plan(plan, rows, group=group, first=first, together=shard is not None)

    def _rows(self, excluded: Optional[Sequence[int]], weight: Tensor) -> Sequence[int]:
        rows = list(excluded or ())
        if excluded is None and isinstance(self._model, nn.Module):
            for layer in without_wrappers(self._model).modules():
                if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
                    if layer.weight is weight:
                        rows.append(layer.padding_idx)
        return excluded_rows(rows, weight.size(0))

    def _norm(self, weight: Tensor) -> float:
        rows, excluded, shard = self._own(weight)
        how = {} if shard is None else {"summed": shard.summed}
        return counted_norm(rows, excluded, **how)
