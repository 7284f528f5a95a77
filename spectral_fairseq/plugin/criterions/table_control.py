"""Control outside the optimiser: the true spectrum of a plain table, the factors of an SVD table.

``--spectrum-decay``, ``--table-centering`` and ``--orthogonality-decay``: the flags, the checks on
them, and the change that is due to a matrix after an update. The trainer carries it out: see
:mod:`spectral_fairseq.plugin.hooks.table_control`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, List, NamedTuple, Optional

from fairseq.dataclass import ChoiceEnum
from torch import Tensor

from spectral_fairseq.errors import ConfigurationError, arguments_as_flags
from spectral_fairseq.functional.spectrum_decay import SCALES, SIDES, TableChange, plan_change
from spectral_fairseq.plugin.criterions import table_prior
from spectral_fairseq.plugin.criterions.output_table import decoder_of, output_table, svd_tables
from spectral_fairseq.plugin.criterions.penalties.needs import ModelView
from spectral_fairseq.plugin.criterions.penalties.spectrum import check_rank
from spectral_fairseq.plugin.flags import Flag, checked, read_flags

share = checked("to be a number from 0 to 1", lambda value: 0 <= value <= 1)

DECAY = Flag(
    "spectrum_decay",
    0.0,
    "eta: after every k-th update draw the true singular values of the plain output table "
    "min(1, eta k lr/lr_max) of the way to their target, outside the optimiser",
    share,
    Optional[float],
)
CENTERING = Flag(
    "table_centering",
    0.0,
    "eta: after every k-th update take min(1, eta k lr/lr_max) of the mean word vector out of "
    "the plain output table",
    share,
    Optional[float],
)
ORTHOGONALITY = Flag(
    "orthogonality_decay",
    0.0,
    "eta: after every k-th update draw the singular values of the factors U and V of an SVD table "
    "min(1, eta k lr/lr_max) of the way to 1, outside the optimiser",
    share,
)
FLAGS = (
    DECAY,
    Flag(
        "spectrum_side",
        "above",
        "with --spectrum-decay draw every singular value to the prior, or only what exceeds "
        "--spectrum-slack times the prior back to that bound",
        str,
        ChoiceEnum(SIDES),
    ),
    Flag(
        "spectrum_slack",
        3.0,
        "factor on the prior of --spectrum-side above",
        checked("to be a finite number >= 1", lambda value: 1 <= value < math.inf),
    ),
    Flag(
        "spectrum_scale",
        "free",
        "with --spectrum-decay take the prior as it is, or scale it to the norm that the table "
        "has, so that it controls the shape alone",
        str,
        ChoiceEnum(SCALES),
    ),
    CENTERING,
    ORTHOGONALITY,
    Flag(
        "spectrum_decay_interval",
        10,
        "k of --spectrum-decay, --table-centering and --orthogonality-decay",
        checked("to be a whole number of at least 1", lambda value: value >= 1),
    ),
    Flag(
        "spectrum_decay_start",
        0,
        "updates before --spectrum-decay, --table-centering and --orthogonality-decay begin",
        checked("to be a whole number of at least 0", lambda value: value >= 0),
    ),
)


class Controlled(NamedTuple):
    """A matrix that is changed after updates.

    Args:
        flag: that asks for it.
        parameter: as the model holds it, shape (n, d).
        excluded: rows that are not counted, shape (m,).
        prior: the singular values that ``parameter`` is drawn to, shape (d,).
        plan: the change that is due to a matrix, given what the optimiser trains for
            ``parameter`` (itself or its float32 copy) and lr / lr_max.
    """

    flag: str
    parameter: Tensor
    excluded: Tensor
    prior: Callable[[Tensor], Tensor]
    plan: Callable[[Tensor, float], TableChange]


class TableControl:
    """The changes that the flags make to a model's tables after an update.

    Args:
        cfg: a configuration with the fields of :data:`FLAGS` and of a table's prior.

    Raises:
        ConfigurationError: a flag outside its range.
    """

    def __init__(self, cfg: Any) -> None:
        self._options = read_flags(FLAGS, cfg)
        self._prior = table_prior.TablePrior(read_flags(table_prior.FLAGS, cfg))

    @property
    def active(self) -> bool:
        """Whether there is anything to do at all."""
        return self._controls_table or bool(self._options.orthogonality_decay)

    @property
    def interval(self) -> int:
        """k, in updates."""
        return self._options.spectrum_decay_interval

    def is_due(self, num_updates: int) -> bool:
        """Whether tables are to be changed after that many updates."""
        started = num_updates > self._options.spectrum_decay_start
        return self.active and started and num_updates % self.interval == 0

    def controlled(self, view: ModelView) -> List[Controlled]:
        """What is changed in a model.

        Raises:
            ConfigurationError: the model has no table of the kind that a flag controls.
        """
        found = []
        if self._controls_table:
            with arguments_as_flags(weight=self._table_flag):
                weight = output_table(view.module, view.words.rows)
            excluded = view.words.excluded_on(weight.device)
            prior = functools.partial(self._prior, decoder_of(view.module), excluded=excluded)
            plan = functools.partial(self._plan_table, prior, excluded)
            found.append(Controlled(self._table_flag, weight, excluded, prior, plan))
        if self._options.orthogonality_decay:
            flag = ORTHOGONALITY.option
            with arguments_as_flags(weight=flag):
                tables = svd_tables(view.module)
            for factor in (factor for table in tables for factor in table.factors()):
                prior = functools.partial(_equal_values, factor.scale)
                plan = functools.partial(self._plan_factor, prior, factor.excluded)
                found.append(Controlled(flag, factor.parameter, factor.excluded, prior, plan))
        return found

    def check(self, view: ModelView) -> None:
        """Refuse a model whose tables cannot be controlled, before training starts.

        Raises:
            ConfigurationError: no table of the kind that a flag controls, one that is not trained,
                or fewer words than dimensions.
        """
        for one in self.controlled(view):
            weight = one.parameter
            if not weight.is_leaf:
                raise ConfigurationError(
                    f"a plain output table, for {one.flag}",
                    "one that is computed from other parameters",
                    "Use --embedding-type plain; an SVD table has --spectrum-weight, "
                    "--orthogonality-weights and --orthogonality-decay instead.",
                )
            if not weight.requires_grad:
                raise ConfigurationError(
                    f"a table that is trained, for {one.flag}",
                    "a frozen one",
                    f"Train it, or set {one.flag} to 0.",
                )
            with arguments_as_flags(weight=one.flag):
                check_rank(weight, one.excluded)
            one.prior(weight)

    def _plan_table(
        self,
        prior: Callable[[Tensor], Tensor],
        excluded: Tensor,
        weight: Tensor,
        lr_share: float,
    ) -> TableChange:
        options = self._options
        return plan_change(
            weight,
            prior(weight),
            self._rate(options.spectrum_decay, lr_share),
            side=options.spectrum_side,
            slack=options.spectrum_slack,
            scale=options.spectrum_scale,
            centering=self._rate(options.table_centering, lr_share),
            excluded=excluded,
        )

    def _plan_factor(
        self,
        prior: Callable[[Tensor], Tensor],
        excluded: Tensor,
        weight: Tensor,
        lr_share: float,
    ) -> TableChange:
        rate = self._rate(self._options.orthogonality_decay, lr_share)
        return plan_change(
            weight, prior(weight), rate, side="both", scale="fixed", excluded=excluded
        )

    def _rate(self, eta: float, lr_share: float) -> float:
        return min(1.0, eta * self.interval * lr_share)

    @property
    def _controls_table(self) -> bool:
        return bool(self._options.spectrum_decay or self._options.table_centering)

    @property
    def _table_flag(self) -> str:
        return (DECAY if self._options.spectrum_decay else CENTERING).option


def _equal_values(scale: Tensor, weight: Tensor) -> Tensor:
    """The singular values of a factor with orthonormal columns: all equal its scale."""
    return scale.expand(weight.size(1))
