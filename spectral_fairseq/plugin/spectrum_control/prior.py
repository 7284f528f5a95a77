"""The prior of a table without factors, whose flags the criterion has.

Note [Prior of a plain table]
-----------------------------
An SVD table knows its prior. For a plain one, of any arch, the criterion takes the same four flags;
on a command line it shares them with the archs of this package. With an automatic c1 the prior has
the norm that the table started with. It is measured when it is first asked for, before the first
update, and kept in the extra state of checkpoints, so that a resumed run goes on with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Optional

from torch import Tensor

from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.errors import arguments_as_flags
from spectral_fairseq.functional.control_rule import counted_norm
from spectral_fairseq.functional.spectrum_penalties import Prior
from spectral_fairseq.options import arguments, flags_by_argument

PRIOR_OPTIONS = tuple(
    one for one in SVDEmbedding.options if one.argument in ("prior", "c1", "c2", "gamma")
)
AN_SVD_TABLE = "an SVD table"
FLAGS = tuple(
    replace(
        one,
        help=one.help.replace("an SVD table", "a plain table"),
        parse=None,
        needs=("spectrum_weight", "spectrum_decay", AN_SVD_TABLE),
    )
    for one in PRIOR_OPTIONS
)

_NAMES = flags_by_argument(PRIOR_OPTIONS)
_NAMES["kind"] = _NAMES.pop("prior")


def prior_of(cfg: Any) -> Prior:
    """The prior that a configuration with the fields of :data:`FLAGS` describes.

    Raises:
        ConfigurationError: a value outside its range.
    """
    with arguments_as_flags(prior=_NAMES["kind"], **_NAMES):
        values = arguments(PRIOR_OPTIONS, cfg)
        return Prior(kind=values.pop("prior"), **values)


class TablePrior:
    """The prior of one table, which remembers the norm that an automatic c1 refers to.

    Args:
        prior: for tables of any width.

    Attributes:
        start_norm: Frobenius norm of the rows that counted when it was first asked for, or as
            restored.
    """

    def __init__(self, prior: Prior) -> None:
        self._prior = prior
        self.start_norm: Optional[float] = None

    def __call__(self, weight: Tensor, excluded: Tensor) -> Tensor:
        """The prior's singular values, largest first, float64, shape (d,).

        Args:
            weight: the table, shape (N, d).
            excluded: rows that are not counted.

        Raises:
            ConfigurationError: the prior leaves directions unused at this width.
        """
        if self._prior.c1 is None and self.start_norm is None:
            self.start_norm = counted_norm(weight, excluded)
        with arguments_as_flags(**_NAMES):
            return self._prior.spectrum(weight.size(1), self.start_norm).to(weight.device)
