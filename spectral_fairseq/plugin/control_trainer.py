"""Spectrum control after an update: of a plain table, and of the factors of an SVD table."""

from __future__ import annotations

import logging
from typing import Any, Callable, Dict, Iterable, List, Optional, TypeVar

import torch
from torch import Tensor

from spectral_fairseq import refusals
from spectral_fairseq.compat.float32_weights import Held, float32_copies, view_for
from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.functional.factor_renewal import redecomposition, singular_system
from spectral_fairseq.functional.row_blocks import multiply_
from spectral_fairseq.functional.table_control import Workers, apply_change_
from spectral_fairseq.methods.control import CENTERING, DECAY
from spectral_fairseq.methods.prior import TablePrior
from spectral_fairseq.plugin.control import SVD_INTERVAL, TableControl
from spectral_fairseq.plugin.criterion import PenalisedCrossEntropy, objectives_in
from spectral_fairseq.plugin.listener import Listener


def trained_weights(optimizer: Any, parameter: Tensor) -> Tensor:
    """What fairseq's optimiser trains for a parameter: itself, or its float32 copy.

    It has the shape of the parameter and no gradient; writing to it changes what is trained.
    """
    return view_for(_held(optimizer, parameter), parameter)


def moments(optimizer: Any, parameter: Tensor) -> Dict[str, Tensor]:
    """The tensors in the state of fairseq's optimiser that belong to a parameter, by name.

    Writing to them changes the state. Those with as many entries as the parameter have its shape.
    There are none before the first step.
    """
    held, start = _held(optimizer, parameter)
    state = optimizer.optimizer.state.get(held, {})
    return {
        name: view_for((value, start), parameter) if value.numel() == held.numel() else value
        for name, value in state.items()
        if isinstance(value, Tensor) and value.dim() > 0
    }


def _held(optimizer: Any, parameter: Tensor) -> Held:
    """The tensor that the optimiser trains, and where the parameter begins in it."""
    return float32_copies(optimizer).get(id(parameter), (parameter, 0))


# ``--svd-interval``: new factors for an SVD table, in the weights and in the optimiser's state.
#
# What an optimiser remembers of gradients belongs to the factors that they were taken for. Averages
# of gradients are carried over as gradients are, averages of squares as those of independent
# gradients. Averages of the weights cannot be: a mean of factors of different decompositions is no
# factor of anything.


# Names in the states of fairseq's optimisers. A momentum is a sum of gradients. The second moments
# of Adafactor's rows do not change when the columns are rotated.
_GRADIENTS = frozenset({"exp_avg", "momentum_buffer"})
_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_col", "sum"})
UNROTATED = frozenset({"exp_avg_sq_row"})


@torch.no_grad()
def renew_factors(table: SVDEmbedding, optimizer: Any, group: Any = None) -> None:
    """Make the factors of a table the singular value decomposition of the same W.

    A table with a singular value of zero keeps its factors, and so does one with a frozen factor.

    Args:
        table: as the model holds it.
        optimizer: as the trainer holds it.
        group: process group of the workers, of which the first one plans; ``None`` is all of them.

    Raises:
        DataError: a factor with infinity or NaN in it; nothing is written.
    """
    factors = {"u": table.U, "sigma": table.sigma, "v": table.V}
    if not all(factor.requires_grad for factor in factors.values()):
        return
    weights = {name: trained_weights(optimizer, factor) for name, factor in factors.items()}
    u, sigma, v = weights["u"], weights["sigma"], weights["v"].double() / table.v_scale
    workers = Workers(group)
    system = singular_system(u, sigma, v, table.excluded_rows) if workers.plans else None
    system = workers.share(system, (v.size(0) + 1, v.size(1)), v.device)
    new = redecomposition(sigma, v, system, float(table.scale))
    if new is None:
        return
    state = {key: moments(optimizer, factor) for key, factor in factors.items()}
    of_sigma_alone = _gradient_of_sigma_alone(state["sigma"], state["u"], u, sigma)
    multiply_(u, new.u_map)
    sigma.copy_(new.sigma)
    weights["v"].copy_(new.vectors * table.v_scale)
    for key, factor in factors.items():
        if factor.data_ptr() != weights[key].data_ptr():
            factor.copy_(weights[key])

    for key, gradient in (("u", new.u_gradient), ("v", new.v_gradient)):
        for name, moment in state[key].items():
            _carry_over(name, moment, gradient)
    for name, moment in state["sigma"].items():
        if name in of_sigma_alone:
            through_table = _gradient_through_table(state["u"][name], u, new.sigma)
            moment.copy_(through_table + of_sigma_alone[name] @ new.v_gradient.square())
        else:
            _carry_over(name, moment.view(1, -1), new.v_gradient)


def _carry_over(name: str, moment: Tensor, gradient: Tensor) -> None:
    """Multiply a moment by the map of the gradients, or by the map of their squares."""
    if name in _GRADIENTS:
        multiply_(moment, gradient)
    elif name in _SQUARES:
        multiply_(moment.view(-1, gradient.size(0)), gradient.square())
    elif name not in UNROTATED:
        raise refusals.RENEWAL.error(f"an optimiser that keeps {name}")


def _gradient_of_sigma_alone(
    state: Dict[str, Tensor], of_u: Dict[str, Tensor], u: Tensor, sigma: Tensor
) -> Dict[str, Tensor]:
    """The part of sigma's averages of gradients that did not come through W, in float64.

    It is that of penalties and of weight decay, which act on sigma alone.
    """
    return {
        name: moment.double() - _gradient_through_table(of_u[name], u, sigma)
        for name, moment in state.items()
        if name in _GRADIENTS
    }


def _gradient_through_table(moment: Tensor, u: Tensor, sigma: Tensor) -> Tensor:
    """diag(U' G_U) / sigma, in float64: what reaches sigma through W."""
    # In the dtype of the moments and without a copy of U.
    return torch.einsum("nk,nk->k", u.to(moment.dtype), moment).double() / sigma.double()


# Where the trainer carries out the control of tables outside the optimiser.
#
# After every update that was taken, outside autograd, clipping and the optimiser, and on the
# weights that the optimiser trains: the float32 copy where fairseq keeps one. The first worker
# plans the change and the others receive it, since two eigensolvers need not agree on the last bit;
# all apply the same products to equal tables. What else a checkpoint needs, the norms that an
# automatic prior refers to, lies in its extra state.
#
# Averaged SGD counts an iterate in when it is made, so an average holds the k-th ones as they were
# before they were changed.


logger = logging.getLogger(__name__)
T = TypeVar("T")


def controls_of(trainer: Any) -> List[TableControl]:
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
        control.svd_interval = _svd_interval(
            trainer.cfg, control.svd_interval, criterion.renewal_is_asked_for
        )
    active = [control for control in controls if control.rule.active or control.svd_interval]
    if active:
        refusals.CONTROL.check(trainer.cfg)
    if criterion.control_is_default and any(control.rule.active for control in active):
        logger.info(
            "the spectrum of the plain output table is controlled outside the optimiser (%s %g, "
            "%s %g); the penalties of the paper are those on an SVD table, of an arch "
            "transformer_sc* or with --embedding-type svd",
            *(DECAY.flag, active[0].rule.decay, CENTERING.flag, active[0].rule.centering),
        )
    return active


def _svd_interval(cfg: Any, interval: int, asked_for: bool) -> int:
    """``--svd-interval`` as this training follows it: 0 where nobody asked and it cannot be.

    Raises:
        UnsupportedError: it was asked for and cannot be followed.
    """
    if not interval:
        return 0
    try:
        refusals.CONTROL.check(cfg)
        refusals.RENEWAL.check(cfg)
        if not asked_for:
            refusals.RENEWAL_STEPS.check(cfg)  # where it could be followed and should not be
    except UnsupportedError as obstacle:
        if asked_for:
            raise
        logger.info(
            "%s is 0: the factors of the SVD table are not renewed, because of %s",
            SVD_INTERVAL.flag,
            obstacle.found,
        )
        return 0
    return interval


@torch.no_grad()
def control_tables(trainer: Any, controls: List[TableControl], lr: float) -> None:
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


def _change_all(controls: Iterable[TableControl], trainer: Any, lr_share: float) -> None:
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


class ControlledTables(Listener):
    """Changes tables after updates; keeps the norms that an automatic prior refers to."""

    name = "table_start_norms"

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.controls: Optional[List[TableControl]] = None
        self.lr = 0.0

    def begin_training(self) -> None:
        """Decide what is done to which table."""
        self.controls = controls_of(self.trainer)

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

    def load(self, saved: Any) -> None:
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
