"""``--spectrum-decay``, ``--table-centering``: control of the output table outside the optimiser.

The flags, the checks on them, and the change that is due to a table after an update. The trainer
calls it: see :mod:`spectral_fairseq.plugin.hooks.table_control`.
"""

from __future__ import annotations

import math
from typing import Any, Optional, Tuple

from fairseq.dataclass import ChoiceEnum
from torch import Tensor, nn

from spectral_fairseq.errors import ConfigurationError, arguments_as_flags
from spectral_fairseq.functional.spectrum_decay import SCALES, SIDES, TableChange, plan_change
from spectral_fairseq.plugin.criterions import table_prior
from spectral_fairseq.plugin.criterions.output_table import decoder_of, output_table
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
        1.5,
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
    Flag(
        "spectrum_decay_interval",
        10,
        "k of --spectrum-decay and --table-centering",
        checked("to be a whole number of at least 1", lambda value: value >= 1),
    ),
    Flag(
        "spectrum_decay_start",
        0,
        "updates before --spectrum-decay and --table-centering begin",
        checked("to be a whole number of at least 0", lambda value: value >= 0),
    ),
)


class TableControl:
    """The change that the flags make to a plain output table after an update.

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
        return bool(self._options.spectrum_decay or self._options.table_centering)

    @property
    def interval(self) -> int:
        """k, in updates."""
        return self._options.spectrum_decay_interval

    def is_due(self, num_updates: int) -> bool:
        """Whether tables are to be changed after that many updates."""
        started = num_updates > self._options.spectrum_decay_start
        return self.active and started and num_updates % self.interval == 0

    def table(self, view: ModelView) -> Tuple[nn.Module, Tensor, Tensor]:
        """What is controlled: decoder, parameter of shape (N, d), rows that are not counted.

        Raises:
            ConfigurationError: the model has no output table.
        """
        with arguments_as_flags(weight=self._flag):
            weight = output_table(view.module, view.words.rows)
        return decoder_of(view.module), weight, view.words.excluded_on(weight.device)

    def check(self, view: ModelView) -> None:
        """Refuse a model whose table cannot be controlled, before training starts.

        Raises:
            ConfigurationError: no output table, a computed one, one that is not trained, or fewer
                words than dimensions.
        """
        if not self.active:
            return
        owner, weight, excluded = self.table(view)
        if not (weight.is_leaf and weight.requires_grad):
            raise ConfigurationError(
                f"a plain output table that is trained, for {self._flag}",
                "a frozen one" if weight.is_leaf else "one that is computed from other parameters",
                "Use --embedding-type plain; an SVD table has --spectrum-weight and "
                "--orthogonality-weights instead.",
            )
        with arguments_as_flags(weight=self._flag):
            check_rank(weight, excluded)
        self._prior(owner, weight, excluded)

    def plan(
        self, owner: nn.Module, weight: Tensor, excluded: Tensor, lr_share: float
    ) -> TableChange:
        """The change that is due to a table.

        Args:
            owner: the decoder that the table belongs to.
            weight: what the optimiser trains, shape (N, d): the parameter or its float32 copy.
            excluded: rows that are not counted.
            lr_share: lr / lr_max, in [0, 1].
        """
        options = self._options
        factor = self.interval * lr_share
        return plan_change(
            weight,
            self._prior(owner, weight, excluded),
            min(1.0, options.spectrum_decay * factor),
            side=options.spectrum_side,
            slack=options.spectrum_slack,
            scale=options.spectrum_scale,
            centering=min(1.0, options.table_centering * factor),
            excluded=excluded,
        )

    @property
    def _flag(self) -> str:
        return (DECAY if self._options.spectrum_decay else CENTERING).option
