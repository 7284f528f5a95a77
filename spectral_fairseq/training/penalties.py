"""The penalties on the output table of a model that exists, weighted and summed."""

from __future__ import annotations

import functools
from typing import Callable, Dict, Sequence, Union

import torch
from torch import Tensor, nn

from spectral_fairseq.embeddings import SVDEmbedding
from spectral_fairseq.errors import ConfigurationError, check_choice, check_range
from spectral_fairseq.functional.products import row_norms
from spectral_fairseq.functional.row_penalties import (
    cosine_penalty,
    mean_vector_penalty,
    weight_norm_penalty,
)
from spectral_fairseq.functional.spectra import singular_values
from spectral_fairseq.functional.spectrum_penalties import (
    check_rank,
    d_optimal_penalty,
    normalized_d_optimal_penalty,
    orthogonality_penalty,
    spectral_normalization_penalty,
    spectrum_penalty,
)
from spectral_fairseq.training.modules import (
    check_not_sharded,
    excluded_rows,
    output_layer,
    weight_of,
)
from spectral_fairseq.training.tables import FactoredLayer


def _of_spectrum(penalty: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda weight, excluded: penalty(singular_values(weight.float(), excluded))


OF_SPECTRUM = {
    "spectral_normalization": _of_spectrum(spectral_normalization_penalty),
    "d_optimal": _of_spectrum(d_optimal_penalty),
    "normalized_d_optimal": _of_spectrum(normalized_d_optimal_penalty),
}
PENALTIES: Dict[str, Callable[..., Tensor]] = {
    "cosine": cosine_penalty,
    "mean_vector": mean_vector_penalty,
    **OF_SPECTRUM,
}
OF_FACTORS = ("spectrum", "orthogonality")


class TablePenalty:
    """The weighted sum of penalties on a model's output table: sum_i weight_i R_i.

    Add it to a mean loss per token, or pass it as ``penalty`` of
    :func:`~spectral_fairseq.training.losses.fused_loss_`; see Note [One scale] there.

    Args:
        model: as for :class:`~spectral_fairseq.training.control.SpectrumControl`.
        weight_norm: weight of the distance of the vectors' norms from ``norm_target``.
        norm_target: nu of ``weight_norm``.
        excluded: rows that are left out; negative ones are counted from the end.
        **weights: of ``cosine``, ``mean_vector``, ``spectral_normalization``, ``d_optimal`` and
            ``normalized_d_optimal``, whose definitions are those of
            :mod:`spectral_fairseq.functional`; for a table of ``factor_`` also of ``spectrum``,
            the distance of sigma from its prior, and of ``orthogonality``, the sum of the squared
            distances of U'U and V'V from I.

    Raises:
        ConfigurationError: an unknown name, a negative weight, a row that is not in the table, no
            table, a penalty on factors for a table without them, or one on singular values for one
            with fewer rows than dimensions.
    """

    def __init__(
        self,
        model: Union[nn.Module, Tensor],
        *,
        weight_norm: float = 0.0,
        norm_target: float = 1.0,
        excluded: Sequence[int] = (),
        **weights: float,
    ) -> None:
        known = ("weight_norm", *PENALTIES, *OF_FACTORS)
        for name, weight in {"weight_norm": weight_norm, **weights}.items():
            check_choice("a penalty", name, known)
            check_range(f"`{name}`", weight, at_least=0)
        table = weight_of(model, "TablePenalty")
        self.excluded = excluded_rows(excluded, table.size(0))
        self.model, self.weights = model, weights
        self.weight_norm, self.norm_target = weight_norm, norm_target
        of_spectrum = [name for name in OF_SPECTRUM if weights.get(name)]
        if of_spectrum:
            count = len(table) - len(self.excluded)
            check_rank(count, table.size(1), ", ".join(of_spectrum), "drop these weights")
        if any(weights.get(name) for name in OF_FACTORS):
            self._factors()

    def _factors(self) -> SVDEmbedding:
        layer = output_layer(self.model) if isinstance(self.model, nn.Module) else None
        table = layer.used_table if isinstance(layer, FactoredLayer) else None
        if not isinstance(table, SVDEmbedding):
            wanted = f"a table of factors for {' and '.join(OF_FACTORS)}"
            remedy = "Call factor_(model) first, or use SpectrumControl."
            raise ConfigurationError(wanted, "one without", remedy)
        return table

    def terms(self) -> Dict[str, Tensor]:
        """Each R before its weight, by name."""
        weight = weight_of(self.model, "TablePenalty")
        check_not_sharded(weight)
        rows = torch.tensor(self.excluded, dtype=torch.long, device=weight.device)
        penalties = {}
        for name, share in self.weights.items():
            if share and name in PENALTIES:
                penalties[name] = PENALTIES[name](weight, rows)
        if self.weight_norm:
            norms = row_norms(weight.float())
            penalties["weight_norm"] = weight_norm_penalty(norms, self.norm_target, rows)
        if self.weights.get("spectrum"):
            table = self._factors()
            penalties["spectrum"] = spectrum_penalty(table.singular_values(), table.prior())
        if self.weights.get("orthogonality"):
            grams = self._factors().grams()
            penalties["orthogonality"] = orthogonality_penalty(*grams, (1.0, 1.0, 0.0, 0.0))
        return penalties

    def __call__(self) -> Tensor:
        """The weighted sum, a scalar."""
        weights = {**self.weights, "weight_norm": self.weight_norm}
        terms = [weights[name] * term for name, term in self.terms().items()]
        return functools.reduce(torch.add, terms) if terms else torch.zeros(())
