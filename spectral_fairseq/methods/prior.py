"""The prior of a table's singular values: its options, and the norm that an automatic c1 keeps."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Optional, Tuple

from torch import Tensor

from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.errors import arguments_as_flags
from spectral_fairseq.functional.spectrum_penalty import Prior
from spectral_fairseq.functional.table_control import counted_norm

# An SVD table has its own prior; that of other tables is given by the same options.
OPTIONS = SVDEmbedding.options


def prior_of(arguments: Mapping[str, Any]) -> Prior:
    """The prior with the parsed values of :data:`OPTIONS`, by their arguments.

    Raises:
        ConfigurationError: a value outside its range.
    """
    values = {entry.argument: arguments[entry.argument] for entry in OPTIONS}
    with arguments_as_flags(kind="`prior`"):
        return Prior(kind=values.pop("prior"), **values)


class TablePrior:
    """The prior of one table, which remembers the norm that an automatic c1 refers to.

    Args:
        prior: for tables of any width.
        flags: what errors call its arguments, where that is another name.

    Attributes:
        prior: as given.
        start_norm: Frobenius norm of the rows that counted when it was first asked for, or as
            restored.
    """

    def __init__(self, prior: Prior, flags: Optional[Mapping[str, str]] = None) -> None:
        self.prior, self._flags = prior, dict(flags or {})
        self.start_norm: Optional[float] = None
        self._found: Optional[Tuple[Tuple[Any, ...], Tensor]] = None

    def __call__(
        self,
        weight: Tensor,
        excluded: Tensor,
        summed: Callable[[Tensor], Tensor] = lambda part: part,
    ) -> Tensor:
        """The prior's singular values, largest first, float64, shape (d,).

        Args:
            weight: the table, shape (N, d), or the rows of it that are here.
            excluded: those of them that are not counted.
            summed: the sum of a tensor over the workers, of a table that is split by rows.

        Raises:
            ConfigurationError: the prior leaves directions unused at this width.
        """
        if self.prior.c1 is None and self.start_norm is None:
            self.start_norm = counted_norm(weight, excluded, summed)
        of = (weight.size(1), self.start_norm, weight.device)
        if self._found is None or self._found[0] != of:  # each copy keeps a GPU waiting
            with arguments_as_flags(**self._flags):
                sigma = self.prior.spectrum(weight.size(1), self.start_norm)
            self._found = (of, sigma.to(weight.device))
        return self._found[1]
