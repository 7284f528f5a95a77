"""An output layer that a mixture of softmaxes or of contexts takes the place of."""

from __future__ import annotations

from typing import Any, Dict

from torch import Tensor

from spectral_fairseq.heads.mixture import MixtureHead
from spectral_fairseq.training.layer_mixins import LayerMixin, refuse_replicas


class MixtureLayer(LayerMixin):
    """An output layer whose scores are the log-probabilities of its ``mixture``."""

    order = 1
    mixture: MixtureHead
    _replicate_for_data_parallel = refuse_replicas  # the mixture refers to this layer

    def forward(self, input: Tensor) -> Tensor:
        """log P of features, shape (*, d): shape (*, N)."""
        scores: Tensor = self.mixture(input)
        return scores

    def beyond_plain(self) -> str:
        """The mixture."""
        return "a mixture of softmaxes"

    def recorded(self) -> Dict[str, Any]:
        """The kind of the mixture and its options."""
        made = self.mixture
        names = ("components", "dropout", "context_scale", "softcap")
        options = {name: getattr(made, name) for name in names}
        return {**super().recorded(), "mixture": {"kind": made.kind, **options}}
