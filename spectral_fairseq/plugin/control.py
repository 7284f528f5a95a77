"""What is done to tables outside the optimiser, and when.

``--spectrum-decay`` and ``--table-centering`` change the spectrum of a plain table,
``--svd-interval`` renews the factors of an SVD table: the flags, and the checks on a model. The
trainer carries it out: see :mod:`spectral_fairseq.plugin.control_trainer`.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

from torch import Tensor, nn

from spectral_fairseq import refusals
from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.errors import ConfigurationError, UnsupportedError, arguments_as_flags
from spectral_fairseq.functional.spectrum_penalty import check_rank
from spectral_fairseq.functional.table_control import TableChange
from spectral_fairseq.methods import control
from spectral_fairseq.methods.control import CENTERING, DECAY, ControlRule
from spectral_fairseq.methods.penalties import required_svd_tables
from spectral_fairseq.options import Option, arguments, flags_by_argument
from spectral_fairseq.plugin.find import output_matrix
from spectral_fairseq.plugin.objective import DecoderTable, Parts

SVD_INTERVAL = Option(
    "svd_interval",
    0,
    "after every k-th update make the factors of an SVD table the singular value decomposition of "
    "the same table, and carry the optimiser's moments over to them; 0 is never",
    at_least=0,
    type=Optional[int],
)
FLAGS = (*control.OPTIONS, SVD_INTERVAL)

# Through U, a plain gradient step changes W by a gradient times V sigma^2 V': large directions grow
# fastest, and factors that are renewed follow them. An AWD-LSTM trained by SGD at a rate of 3 ends
# with a table of rank one, and 0.98 bits behind one whose factors are left alone.
_UNSCALED_STEPS = ("nag", "sgd")


def rule_from_flags(cfg: Any) -> ControlRule:
    """What a criterion's configuration does to the spectrum of a plain table, and when.

    Raises:
        ConfigurationError: a flag outside its range.
    """
    with arguments_as_flags(**flags_by_argument(control.OPTIONS)):
        return ControlRule(**arguments(control.OPTIONS, cfg))


class ControlledTables:
    """The tables of one model of fairseq that are changed after updates, and how.

    For models of torch ``SpectrumControl`` of ``training/control.py`` does this.

    Args:
        cfg: a configuration with the fields of :data:`FLAGS`.
        parts: what the model consists of.
        given: the configuration as the user gave it, where the criterion may leave flags unset.

    Attributes:
        rule: what is done to the spectrum of a plain table, and when.
        svd_interval: after how many updates the factors of SVD tables are renewed; 0 is never.

    Raises:
        ConfigurationError: a flag outside its range.
    """

    def __init__(self, cfg: Any, parts: Parts, given: Any) -> None:
        self.rule = rule_from_flags(cfg)
        self.svd_interval: int = SVD_INTERVAL.read(cfg)
        self._parts, self._given = parts, given

    def follow(self, cfg: Any) -> Optional[str]:
        """Refuse a training that cannot control a table, and renew factors only where it can.

        ``svd_interval`` becomes 0 where nobody asked for renewal and a training cannot do it, or
        where the table would lose its rank by it.

        Args:
            cfg: the configuration of the whole training.

        Returns:
            What stands in the way of renewal, if ``svd_interval`` was set to 0.

        Raises:
            UnsupportedError: a plain table is controlled or renewal was asked for, and that is not
                possible.
        """
        if self.rule.active:
            refusals.CONTROL.check(cfg)
        if not self.svd_interval:
            return None
        asked_for = self._given.svd_interval is not None
        try:
            refusals.CONTROL.check(cfg)
            refusals.RENEWAL.check(cfg)
        except UnsupportedError as error:
            if asked_for:
                raise
            obstacle = error.found
        else:
            if asked_for or cfg.optimizer._name not in _UNSCALED_STEPS:
                return None
            obstacle = f"--optimizer {cfg.optimizer._name}"
        self.svd_interval = 0
        return obstacle

    @property
    def is_default(self) -> bool:
        """Whether ``--criterion spectrum_control`` chose what is done to a plain table."""
        return all(getattr(self._given, one.name) is None for one in (DECAY, CENTERING))

    @property
    def intervals(self) -> List[int]:
        """After how many updates tables are changed; none where they never are."""
        of_rule = self.rule.every if self.rule.active else 0
        return [every for every in (of_rule, self.svd_interval) if every]

    @property
    def flag(self) -> str:
        """What the user gave that asks for a change of the spectrum, for messages."""
        asking = [one.flag for one in (DECAY, CENTERING) if getattr(self._given, one.name)]
        return asking[0] if asking else "--criterion spectrum_control"

    @property
    def table(self) -> Optional[Tensor]:
        """The plain table whose spectrum is changed, shape (N, d), if one is.

        Raises:
            ConfigurationError: the model has no such table.
        """
        if not self.rule.active:
            return None
        with arguments_as_flags(weight=self.flag):
            return output_matrix(self._parts.decoder, self._parts.words.rows)

    def excluded(self, weight: Tensor) -> Tensor:
        """The rows of that table that are left alone, shape (m,)."""
        return self._parts.words.excluded_on(weight.device)

    def plan(self, weight: Tensor, rate: float) -> TableChange:
        """The change that is due to that table.

        Args:
            weight: what the optimiser trains for it: itself or its float32 copy.
            rate: lr / lr_max.
        """
        excluded = self.excluded(weight)
        prior = self._parts.prior(weight, excluded)
        return self.rule.plan(weight, rate, prior=prior, excluded=excluded)

    @property
    def renewed(self) -> Sequence[SVDEmbedding]:
        """The tables whose factors are renewed.

        Raises:
            ConfigurationError: the model has no SVD table.
        """
        if not self.svd_interval:
            return ()
        with arguments_as_flags(weight=SVD_INTERVAL.flag):
            return required_svd_tables(DecoderTable(self._parts))

    def check(self) -> None:
        """Refuse a model whose tables cannot be controlled, before training starts.

        Raises:
            ConfigurationError: no table of the kind that a flag controls, one that is not trained,
                or fewer words than dimensions.
        """
        for table in self.renewed:
            if not all(factor.requires_grad for factor in (table.U, table.sigma, table.V)):
                raise refusals.FROZEN.error("a frozen one", SVD_INTERVAL.flag)
        weight = self.table
        if weight is None:
            return
        if not isinstance(weight, nn.Parameter):
            raise ConfigurationError(
                f"a plain output table, for {self.flag}",
                "one computed from other parameters, as with --embedding-type weight-norm",
                "Use an arch with a plain one, as with --embedding-type plain; or, in place of the "
                f"control, --spectrum-weight, a penalty on any table; or drop {self.flag}.",
            )
        if not weight.requires_grad:
            raise refusals.FROZEN.error("a frozen one", self.flag)
        excluded = self.excluded(weight)
        with arguments_as_flags(weight=self.flag):
            check_rank(len(weight) - len(excluded), weight.size(1))
        self._parts.prior(weight, excluded)
