"""What the host asks of every decoder that carries a state from segment to segment."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

from fairseq.models import FairseqIncrementalDecoder
from torch import Tensor

# Such networks read any length; the host asks for a number.
MAX_POSITIONS = 10**6

# Two tensors of every layer: hidden and cell state, or keys and values.
LayerPairs = List[Tuple[Tensor, Tensor]]


class StatefulDecoder(FairseqIncrementalDecoder):
    """A network over look-ups and its output layer; subclasses define ``forward``.

    Args:
        dictionary: of words.
        network: from tokens to features, with ``layers``.
        head: output layer.
    """

    stateful = True
    batch_dim = 0  # of the tensors that are kept between the steps of a search

    def __init__(self, dictionary: Any, network: Any, head: Any) -> None:
        super().__init__(dictionary)
        self.network = network
        self.output_projection = head

    def extract_features(
        self, prev_output_tokens: Tensor, **kwargs: Any
    ) -> Tuple[Tensor, Dict[str, Any]]:
        """As :meth:`forward`, without the output layer."""
        return self(prev_output_tokens, features_only=True, **kwargs)

    def output_layer(self, features: Tensor) -> Tensor:
        """Scores, shape (B, T, N), of ``features``, shape (B, T, d_h)."""
        return self.output_projection(features)

    def max_positions(self) -> int:
        """Segments of any length."""
        return MAX_POSITIONS

    def reorder_incremental_state(self, incremental_state: Any, new_order: Tensor) -> None:
        """fairseq's hook: keep the states of the hypotheses that a search keeps."""
        pairs = self._cached(incremental_state)
        if pairs is not None:
            dim = self.batch_dim
            self._cache(
                incremental_state,
                [
                    (a.index_select(dim, new_order), b.index_select(dim, new_order))
                    for a, b in pairs
                ],
            )

    def _cached(self, incremental_state: Any) -> Optional[LayerPairs]:
        cached = self.get_incremental_state(incremental_state, "layers")
        if not cached:
            return None
        layers = range(len(self.network.layers))
        return [(cached[f"first{index}"], cached[f"second{index}"]) for index in layers]

    def _cache(self, incremental_state: Any, pairs: Sequence[Sequence[Tensor]]) -> None:
        # The host's type for a state: named tensors.
        cached = {}
        for index, (first, second) in enumerate(pairs):
            cached[f"first{index}"], cached[f"second{index}"] = first, second
        self.set_incremental_state(incremental_state, "layers", cached)
