"""What is done to tables outside the optimiser, and when.

``--spectrum-decay`` and ``--table-centering`` change the spectrum of a plain table,
``--svd-interval`` renews the factors of an SVD table: the flags, the checks on them, and the change
that is due after an update. The trainer carries it out: see
:mod:`spectral_fairseq.plugin.control_trainer`.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence

from torch import Tensor, nn

from spectral_fairseq import refusals
from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.errors import ConfigurationError, arguments_as_flags
from spectral_fairseq.functional.spectrum_penalties import check_rank
from spectral_fairseq.functional.table_control import SCALES, SIDES, ControlRule, TableChange
from spectral_fairseq.options import Option, read_options
from spectral_fairseq.plugin.find import output_matrix
from spectral_fairseq.plugin.objective import Inputs
from spectral_fairseq.plugin.penalties import svd_tables

DECAY = Option(
    "spectrum_decay",
    0.0,
    "eta: after every k-th update move the true singular values of the plain output table "
    "min(1, eta k lr/lr_max) of the way to their target, outside the optimiser",
    at_least=0,
    at_most=1,
    type=Optional[float],
)
CENTERING = Option(
    "table_centering",
    0.0,
    "eta: after every k-th update take min(1, eta k lr/lr_max) of the mean word vector out of "
    "the plain output table",
    at_least=0,
    at_most=1,
    type=Optional[float],
)
SVD_INTERVAL = Option(
    "svd_interval",
    0,
    "after every k-th update make the factors of an SVD table the singular value decomposition of "
    "the same table, and carry the optimiser's moments over to them; 0 is never",
    at_least=0,
    type=Optional[int],
)
NEEDS_DECAY = ("spectrum_decay",)
NEEDS_EITHER = ("spectrum_decay", "table_centering")
FLAGS = (
    DECAY,
    Option(
        "spectrum_side",
        "above",
        "with --spectrum-decay move every singular value to the prior, or only what exceeds "
        "--spectrum-slack times the prior back to that bound",
        choices=SIDES,
        needs=NEEDS_DECAY,
    ),
    Option(
        "spectrum_slack",
        3.0,
        "factor on the prior of --spectrum-side above",
        at_least=1,
        needs=NEEDS_DECAY,
    ),
    Option(
        "spectrum_scale",
        "free",
        "with --spectrum-decay take the prior as it is, or scale it to the norm that the table "
        "has: 'both' then keeps that norm, while 'above' shortens the table by what it cuts",
        choices=SCALES,
        needs=NEEDS_DECAY,
    ),
    CENTERING,
    Option(
        "spectrum_decay_interval",
        10,
        "k of --spectrum-decay and --table-centering",
        at_least=1,
        needs=NEEDS_EITHER,
    ),
    Option(
        "spectrum_decay_start",
        0,
        "updates before --spectrum-decay and --table-centering begin",
        at_least=0,
        needs=NEEDS_EITHER,
    ),
    SVD_INTERVAL,
)


class Controlled(NamedTuple):
    """A matrix that is changed after updates.

    Args:
        flag: that asks for it.
        parameter: as the model holds it, shape (n, d).
        excluded: rows that are not counted, shape (m,).
        plan: the change that is due to a matrix, given what the optimiser trains for
            ``parameter`` (itself or its float32 copy) and lr / lr_max.
    """

    flag: str
    parameter: Tensor
    excluded: Tensor
    plan: Callable[[Tensor, float], TableChange]


class TableControl:
    """The changes that the flags make to a model's tables after an update.

    Args:
        cfg: a configuration with the fields of :data:`FLAGS`.

    Attributes:
        rule: what is done to the spectrum of a plain table, and when.
        svd_interval: after how many updates the factors of SVD tables are renewed; 0 is never.

    Raises:
        ConfigurationError: a flag outside its range.
    """

    def __init__(self, cfg: Any) -> None:
        options = read_options(FLAGS, cfg)
        self.rule = ControlRule(
            decay=options.spectrum_decay,
            slack=options.spectrum_slack,
            centering=options.table_centering,
            every=options.spectrum_decay_interval,
            start=options.spectrum_decay_start,
            side=options.spectrum_side,
            scale=options.spectrum_scale,
        )
        self.svd_interval: int = options.svd_interval

    def controlled(self, inputs: Inputs) -> Optional[Controlled]:
        """What is changed in a model, if anything is.

        Raises:
            ConfigurationError: the model has no table of the kind that a flag controls.
        """
        if not self.rule.active:
            return None
        with arguments_as_flags(weight=self._table_flag):
            weight = output_matrix(inputs.decoder, inputs.words.rows)
        excluded = inputs.words.excluded_on(weight.device)
        prior = functools.partial(inputs.parts.prior, excluded=excluded)
        plan = functools.partial(self.rule.plan, prior=prior, excluded=excluded)
        return Controlled(self._table_flag, weight, excluded, plan)

    def renewed(self, inputs: Inputs) -> Sequence[SVDEmbedding]:
        """The tables of a model whose factors are renewed.

        Raises:
            ConfigurationError: it has no SVD table.
        """
        if not self.svd_interval:
            return ()
        with arguments_as_flags(weight=SVD_INTERVAL.flag):
            return svd_tables(inputs)

    def check(self, inputs: Inputs) -> None:
        """Refuse a model whose tables cannot be controlled, before training starts.

        Raises:
            ConfigurationError: no table of the kind that a flag controls, one that is not trained,
                or fewer words than dimensions.
        """
        for table in self.renewed(inputs):
            if not all(factor.requires_grad for factor in (table.U, table.sigma, table.V)):
                raise refusals.FROZEN.error("a frozen one", SVD_INTERVAL.flag)
        controlled = self.controlled(inputs)
        if controlled is None:
            return
        weight = controlled.parameter
        if not isinstance(weight, nn.Parameter):
            raise ConfigurationError(
                f"a plain output table, for {controlled.flag}",
                "one computed from other parameters, as with --embedding-type weight-norm",
                "Use --embedding-type plain; or svd with --spectrum-weight, "
                "--orthogonality-weights and --svd-interval; or leave --criterion "
                "spectrum_control, which sets the flag, for a criterion without it, such as "
                "label_smoothed_cross_entropy.",
            )
        if not weight.requires_grad:
            raise refusals.FROZEN.error("a frozen one", controlled.flag)
        with arguments_as_flags(weight=controlled.flag):
            counted = len(weight) - len(controlled.excluded)
            or_else = "drop `weight`; or leave --criterion spectrum_control, if that sets the flag"
            check_rank(counted, weight.size(1), otherwise=or_else)
        inputs.parts.prior(weight, controlled.excluded)

    @property
    def _table_flag(self) -> str:
        return (DECAY if self.rule.decay else CENTERING).flag


# What ``--criterion spectrum_control`` does where its flags are not given: one of two methods.
#
# An SVD table has the penalties of the paper on its factors, which are renewed so that they stay
# the singular value decomposition that the penalties are meant for. Any other output table is
# controlled outside the optimiser; whoever asks for a penalty on its true spectrum has that
# instead.


METHODS: Dict[str, Dict[str, Any]] = {
    "penalties on factors": {
        # The paper gives grids and no values; these are the ones studies/spectrum arrives at.
        "spectrum_weight": 0.0001,
        "orthogonality_weights": "0.001,0.001,0,0",
        "svd_interval": 10,
        "spectrum_decay": 0.0,
        "table_centering": 0.0,
    },
    "decoupled control": {
        "spectrum_weight": 0.0,
        "orthogonality_weights": "0,0,0,0",
        "svd_interval": 0,
        # The gentlest values that hold the bound: studies/spectrum. With an interval of ten updates
        # they go a tenth of the way at the full learning rate.
        "spectrum_decay": 0.01,
        "table_centering": 0.01,
    },
}
# The flags that a criterion may leave unset.
NAMES = tuple(METHODS["penalties on factors"])


def with_method(cfg: Any, has_svd: bool) -> Any:
    """A copy of a criterion's configuration, in which the flags not given are those of the method.

    The method depends on whether the model has an SVD table.
    """
    values = dict(METHODS["penalties on factors" if has_svd else "decoupled control"])
    if cfg.spectrum_weight and not has_svd:  # a penalty on the true spectrum
        values.update(spectrum_decay=0.0, table_centering=0.0)
    if cfg.spectrum_weight == 0:
        values.update(svd_interval=0)
    cfg = copy.copy(cfg)
    for name, value in values.items():
        if getattr(cfg, name) is None:
            setattr(cfg, name, value)
    return cfg
