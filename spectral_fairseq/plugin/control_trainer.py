"""Spectrum control after an update: of a plain table, and of the factors of an SVD table.

It acts after every update that was taken, outside autograd, clipping and the optimiser, and on the
weights that the optimiser trains: the float32 copy where fairseq keeps one. The first worker
plans the change and the others receive it, since two eigensolvers need not agree on the last bit;
all apply the same products to equal tables. What else a checkpoint needs, the norms that an
automatic prior refers to, lies in its extra state.

Averaged SGD adds each iterate to its average when it is made. The average therefore holds every
k-th iterate as it was before the control changed it.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Callable, Dict, Iterable, List, Optional, TypeVar

import torch

from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.functional.table_control import apply_change_
from spectral_fairseq.functional.workers import Workers
from spectral_fairseq.methods.control import CENTERING, DECAY
from spectral_fairseq.methods.prior import TablePrior
from spectral_fairseq.plugin.control import SVD_INTERVAL, ControlledTables
from spectral_fairseq.plugin.criterion import PenalisedCrossEntropy, objectives_in
from spectral_fairseq.plugin.factor_renewal import renew_factors
from spectral_fairseq.plugin.listener import Listener
from spectral_fairseq.plugin.trained_weights import trained_weights

logger = logging.getLogger(__name__)
T = TypeVar("T")


def controls_of(trainer: Any) -> List[ControlledTables]:
    """What is done to the tables of each model of a trainer.

    Raises:
        UnsupportedError: sharded parameters, workers whose weights differ, or an optimiser whose
            state cannot be carried over to renewed factors.
    """
    criterion = trainer.get_criterion()
    if not isinstance(criterion, PenalisedCrossEntropy):
        if any(isinstance(module, SVDEmbedding) for module in trainer.get_model().modules()):
            logger.warning(
                "an SVD table is trained without spectrum control: use --criterion "
                "spectrum_control, or --embedding-type plain or weight-norm with your criterion"
            )
        return []
    controls = [one.control for one in criterion.objectives_of(trainer.get_model())]
    for control in controls:
        obstacle = control.follow(trainer.cfg)
        if obstacle:
            logger.info(
                "%s is 0: the factors of the SVD table are not renewed, because of %s",
                SVD_INTERVAL.flag,
                obstacle,
            )
    active = [control for control in controls if control.rule.active or control.svd_interval]
    if any(control.rule.active and control.is_default for control in active):
        logger.info(
            "the spectrum of the plain output table is controlled outside the optimiser (%s %g, "
            "%s %g); the penalties of the paper are those on an SVD table, of an arch "
            "transformer_sc* or with --embedding-type svd",
            *(DECAY.flag, active[0].rule.decay, CENTERING.flag, active[0].rule.centering),
        )
    return active


@torch.no_grad()
def control_tables(trainer: Any, controls: List[ControlledTables], lr: float) -> None:
    """Change the tables if that is due after the latest update, which had the learning rate lr.

    Raises:
        DataError: a table with infinity or NaN in it; no table is written.
    """
    updates = trainer.get_num_updates()
    due = [control for control in controls if control.rule.is_due(updates)]
    if due:
        highest = _highest_lr(trainer)
        lr_share = min(1.0, lr / highest) if highest > 0 else 0.0
        _change_all(_once(due, lambda control: control.table), trainer, lr_share)
    renewed = [
        table
        for control in controls
        if control.svd_interval and updates % control.svd_interval == 0
        for table in control.renewed
    ]
    for table in _once(renewed, lambda table: table):
        renew_factors(table, trainer.optimizer, trainer.data_parallel_process_group)


def _highest_lr(trainer: Any) -> float:
    """The learning rate that the schedule rises to."""
    # Of --lr-scheduler manual, which takes no --lr where it has a rate of its own.
    schedule = trainer.lr_scheduler
    manual = [getattr(schedule, name, None) or {} for name in ("epoch2lr", "update2lr")]
    rates = [rate for by_time in manual for rate in by_time.values()]
    # Of --lr-scheduler triangular; its --lr is the lowest.
    peak = getattr(trainer.cfg.lr_scheduler, "max_lr", None)
    return max(rates or [*trainer.cfg.optimization.lr, *([] if peak is None else [float(peak)])])


def _change_all(controls: Iterable[ControlledTables], trainer: Any, lr_share: float) -> None:
    """Plan the change of every table before the first one is written."""
    workers = Workers(trainer.data_parallel_process_group)
    planned = []
    for control in controls:
        table: Any = control.table
        weight = trained_weights(trainer.optimizer, table)
        change = control.plan(weight, lr_share) if workers.plans else None
        change = workers.share_change(change, weight)
        change.check()
        planned.append((table, weight, change, control.excluded(weight)))
    for table, weight, change, excluded in planned:
        apply_change_(weight, change, excluded)
        if weight.data_ptr() != table.data_ptr():
            table.copy_(weight)


def _once(items: Iterable[T], key: Callable[[T], Any]) -> List[T]:
    """What is found in the models of a trainer, each thing once."""
    return list({id(key(item)): item for item in items}.values())


class TableChanges(Listener):
    """Changes tables after updates; keeps the norms that an automatic prior refers to."""

    name = "table_start_norms"

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.controls: Optional[List[ControlledTables]] = None
        self.lr = 0.0

    def begin_training(self) -> None:
        """Decide what is done to which table."""
        self.controls = controls_of(self.trainer)
        # Every table is changed at multiples of these.
        self.interval = math.gcd(*(every for one in self.controls for every in one.intervals)) or 1

    @property
    def is_active(self) -> bool:
        """Whether tables are changed, or a penalty refers to such norms."""
        return self.controls is None or bool(self.controls or self.save())

    def before_update(self) -> None:
        """Note the learning rate, which the update replaces by the next one."""
        self.lr = self.trainer.get_lr()

    def after_update(self) -> None:
        """Change the tables if that is due."""
        control_tables(self.trainer, self.controls or [], self.lr)

    def save(self) -> Dict[str, float]:
        """Name of a decoder -> the norm with which its output table started."""
        priors = self._priors()
        return {
            name: prior.start_norm for name, prior in priors.items() if prior.start_norm is not None
        }

    def restore(self, saved: Any) -> None:
        """Go on with the norms of the checkpoint; tables that it does not name keep their own."""
        if saved:
            for name, prior in self._priors().items():
                prior.start_norm = saved.get(name, prior.start_norm)

    def _priors(self) -> Dict[str, TablePrior]:
        of_decoder = {
            objective.parts.decoder: objective.parts.prior
            for objective in objectives_in(self.trainer)
        }
        modules = self.trainer.get_model().named_modules()
        return {name: of_decoder[module] for name, module in modules if module in of_decoder}
