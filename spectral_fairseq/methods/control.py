"""Control of a plain table outside the optimiser: what is done to it, and after which updates.

After every k-th update

    sigma_i <- sigma_i + eta k s (target_i - sigma_i),     w_j <- w_j - eta' k s mean,

where s is the learning rate as a share of the highest one of its schedule. The mathematics is in
``functional/table_control.py``. The options are flags of the criterions and arguments of
``SpectrumControl``; the flags are off unless they are given or their criterion sets them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Optional

from torch import Tensor

from spectral_fairseq.errors import check_choice
from spectral_fairseq.functional.table_control import (
    SCALE,
    SCALES,
    SIDE,
    SIDES,
    SLACK,
    TableChange,
    plan_change,
)
from spectral_fairseq.options import Option

NEEDS_DECAY = ("spectrum_decay",)
NEEDS_EITHER = ("spectrum_decay", "table_centering")
DECAY = Option(
    "spectrum_decay",
    0.0,
    "eta: after every k-th update move the true singular values of the plain output table "
    "min(1, eta k lr/lr_max) of the way to their target, outside the optimiser",
    at_least=0,
    at_most=1,
    argument="decay",
    type=Optional[float],
)
CENTERING = Option(
    "table_centering",
    0.0,
    "eta: after every k-th update take min(1, eta k lr/lr_max) of the mean word vector out of "
    "the plain output table",
    at_least=0,
    at_most=1,
    argument="centering",
    type=Optional[float],
)
OPTIONS = (
    DECAY,
    Option(
        "spectrum_side",
        SIDE,
        "which singular values --spectrum-decay moves: 'both' moves each of them to the prior, "
        "'above' only those that exceed --spectrum-slack times the prior, back to that bound",
        choices=SIDES,
        argument="side",
        needs=NEEDS_DECAY,
    ),
    Option(
        "spectrum_slack",
        SLACK,
        "factor on the prior of --spectrum-side above",
        at_least=1,
        argument="slack",
        needs=NEEDS_DECAY,
    ),
    Option(
        "spectrum_scale",
        SCALE,
        "the prior of --spectrum-decay: 'fixed' takes it as it is, 'free' scales it to the norm "
        "that the table has; with --spectrum-side both the table then keeps that norm, with above "
        "it is shortened by what is cut",
        choices=SCALES,
        argument="scale",
        needs=NEEDS_DECAY,
    ),
    CENTERING,
    Option(
        "spectrum_decay_interval",
        10,
        "k of --spectrum-decay and --table-centering",
        at_least=1,
        argument="every",
        needs=NEEDS_EITHER,
    ),
    Option(
        "spectrum_decay_start",
        0,
        "updates before --spectrum-decay and --table-centering begin",
        at_least=0,
        argument="start",
        needs=NEEDS_EITHER,
    ),
)
_DEFAULTS = {entry.argument: entry.default for entry in OPTIONS}


@dataclass(frozen=True)
class ControlRule:
    """What is done to a table, and after which updates; the fields are those of :data:`OPTIONS`.

    The defaults of ``decay`` and ``centering`` are the gentlest values that hold the bound:
    studies/spectrum. With an interval of ten updates they go a tenth of the way at the full
    learning rate.

    Raises:
        ConfigurationError: one of them is outside its range.
    """

    decay: float = 0.01
    slack: float = _DEFAULTS["slack"]
    centering: float = 0.01
    every: int = _DEFAULTS["every"]
    start: int = _DEFAULTS["start"]
    side: str = _DEFAULTS["side"]
    scale: str = _DEFAULTS["scale"]

    def __post_init__(self) -> None:
        for entry in OPTIONS:
            value = entry.as_argument(getattr(self, entry.argument))
            if entry.choices:
                check_choice(f"`{entry.argument}`", value, entry.choices)

    @property
    def active(self) -> bool:
        """Whether a table is ever changed."""
        return bool(self.decay or self.centering)

    def is_due(self, updates: int) -> bool:
        """Whether a table is to be changed after that many updates."""
        return self.active and updates > self.start and updates % self.every == 0

    def plan(
        self,
        weight: Tensor,
        rate: float,
        *,
        prior: Tensor,
        excluded: Tensor,
        summed: Callable[[Tensor], Tensor] = lambda part: part,
    ) -> TableChange:
        """The change that is due to a matrix, which is not yet applied.

        Args:
            weight: the table, or the float32 copy that an optimiser trains, shape (N, d).
            rate: s, at most 1.
            prior: the singular values that the matrix is moved to, shape (d,).
            excluded: rows that are left alone, shape (m,).
            summed: as of :func:`~spectral_fairseq.functional.table_control.plan_change`.
        """
        return plan_change(
            weight,
            prior,
            min(1.0, self.decay * self.every * rate),
            side=self.side,
            slack=self.slack,
            scale=self.scale,
            centering=min(1.0, self.centering * self.every * rate),
            excluded=excluded,
            summed=summed,
        )
