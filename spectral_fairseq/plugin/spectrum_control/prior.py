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
from typing import Any, Dict
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.errors import arguments_as_flags
from spectral_fairseq.functional.spectrum_penalties import DEFAULT_GAMMA, prior_spectrum
from spectral_fairseq.options import arguments, flags_by_argument
from spectral_fairseq.training.control import counted_norm

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

# Decoder -> Frobenius norm of its output table when it was first asked for, or as restored.
_start_norms: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()


class TablePrior:
    """The prior that the flags describe, for a table of any width.

    Args:
        options: values of :data:`FLAGS`.

    Raises:
        ConfigurationError: a value outside its range.
    """

    def __init__(self, options: Any) -> None:
        self._flags = flags_by_argument(PRIOR_OPTIONS)
        self._flags["kind"] = self._flags["prior"]
        with arguments_as_flags(**self._flags):
            self._shape = arguments(PRIOR_OPTIONS, options)
        self._shape["kind"] = self._shape.pop("prior")
        if self._shape["gamma"] is None:
            self._shape["gamma"] = DEFAULT_GAMMA.get(self._shape["kind"], 1.0)
        self._spectrum(1, 1.0)

    def __call__(self, owner: nn.Module, weight: Tensor, excluded: Tensor) -> Tensor:
        """The prior's singular values, largest first, float64, shape (d,).

        Args:
            owner: the decoder that the table belongs to.
            weight: the table, shape (N, d).
            excluded: rows that are not counted.

        Raises:
            ConfigurationError: the prior leaves directions unused at this width.
        """
        norm = start_norm(owner, weight, excluded) if self._shape["c1"] is None else 1.0
        return self._spectrum(weight.size(1), norm).to(weight.device)

    def _spectrum(self, dim: int, norm: float) -> Tensor:
        with arguments_as_flags(**self._flags):
            return prior_spectrum(dim=dim, frobenius_norm=norm, dtype=torch.float64, **self._shape)


def start_norm(owner: nn.Module, weight: Tensor, excluded: Tensor) -> float:
    """Frobenius norm of the rows that counted when this was first asked for, or as restored.

    Args:
        owner: the decoder that the table belongs to.
        weight: the table, shape (N, d).
        excluded: rows that are not counted.
    """
    if owner not in _start_norms:
        _start_norms[owner] = counted_norm(weight, excluded)
    return _start_norms[owner]


def start_norms(model: nn.Module) -> Dict[str, float]:
    """Name of a decoder in ``model`` -> the norm that its output table started with."""
    return {
        name: _start_norms[module]
        for name, module in model.named_modules()
        if module in _start_norms
    }


def restore_start_norms(model: nn.Module, norms: Dict[str, float]) -> None:
    """Go on with the norms of :func:`start_norms`; tables that are not named keep their own."""
    for name, module in model.named_modules():
        if name in norms:
            _start_norms[module] = norms[name]
